/* Sends requests at their instants, receives on many connections, and returns only when somebody has to look:
   scripts/load_tester/client/courier.py.

   Every piece that comes is read at once and kept with the instant right after it was read, in the place of its
   connection. Places with something to look at are marked: where the body of a chunked response is coming, a piece that
   may be its end is (its last four bytes begin with \r, or it is shorter than that), elsewhere any. Whoever waits for a
   connection is told at once; of others the caller hears when there is another reason to return. The end of a
   connection, an error, a full place, and something to do for the rest of the process always are one.

   A request needs a place that nothing else comes to: one that the caller names, or one whose response has ended as
   streams of events do, though nobody has looked at it yet. Then the place says with which piece the next response
   begins. Without such a place, or if the request does not fit into the socket, the caller goes on with it.

   One thread does everything, and all memory is the caller's. epoll keeps the address of a place (of the rest of the
   process: none; of the timer: that of what is to be sent), so a descriptor must be taken out of it before it is closed,
   and before its place goes. As nobody can do either between epoll_wait and recv, no event is of another connection that
   has got the same descriptor. */

#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

enum { MAX_EVENTS = 64, MAX_PIECES = 256, MAX_BYTES = 32768, MAX_TURNS = 16, MAX_DEPARTURES = 32 };
#define MAX_INSTANT 1e12 /* later is never */
enum { PLACE_DUE = 1, REST_DUE = 2, RING_DUE = 4 };

/* Of one connection; as in courier.py. */
struct place {
    int32_t fd;
    int32_t is_chunked; /* the body of a chunked response is coming */
    int32_t is_awaited; /* somebody waits for its end */
    int32_t is_marked;
    int32_t is_closed; /* by the peer, or by the error beside it; no more will come */
    int32_t error;     /* errno */
    int32_t is_kept;   /* by the peer, after a stream's end: another request may go out on it before anybody looks */
    int32_t is_over;   /* the end of a stream was the last that came */
    int32_t is_full;   /* nothing more is read; once there is room, it has to be watched again */
    int32_t num_pieces, num_bytes;
    uint32_t num_turns; /* responses after the first of those that lie here */
    uint32_t turns[MAX_TURNS]; /* with which piece they begin */
    uint64_t number;      /* not 0 */
    uint64_t next_marked; /* number of another one; 0: none */
    double closed_at;     /* seconds of CLOCK_MONOTONIC, as all instants */
    double stamps[MAX_PIECES];
    uint32_t sizes[MAX_PIECES];
    char bytes[MAX_BYTES];
};

/* A request that goes out at an instant. */
struct departure {
    double at, sent_at;
    const char *data;
    int64_t size, num_sent;
    int64_t is_awaited; /* as in the place that it is sent from */
    uint64_t number;    /* of that place */
};

/* What is to be sent, in order, and from where; a ring. The last of the idle places is used first. */
struct departures {
    double ring_at;  /* when to return in any case */
    double armed_at; /* what the timer is set to */
    int32_t timer;   /* its descriptor */
    int32_t num_idle;
    uint64_t next, end;
    struct place *idle[MAX_DEPARTURES];
    struct departure line[MAX_DEPARTURES];
};

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void mark(struct place *place, uint64_t *first_marked) {
    if (place->is_marked) return;
    place->is_marked = 1;
    place->next_marked = *first_marked;
    *first_marked = place->number;
}

/* Whether what came ends as a stream of events does; nothing else can, since no event of JSON has an empty line in it. */
static int is_end_of_stream(const struct place *place) {
    static const char end[] = "[DONE]\n\n\r\n0\r\n\r\n";
    const int size = sizeof end - 1;
    return place->num_bytes >= size && memcmp(place->bytes + place->num_bytes - size, end, (size_t)size) == 0;
}

/* Read once. Returns whether that is a reason to return; afterwards is_full tells whether there may be more. */
static int receive_one(struct place *place, struct departures *departures, uint64_t *first_marked) {
    const int room = MAX_BYTES - place->num_bytes;
    char *const bytes = place->bytes + place->num_bytes;
    const ssize_t size = recv(place->fd, bytes, (size_t)room, MSG_DONTWAIT);
    const int error = size < 0 ? errno : 0;
    const double at = now();
    if (error == EAGAIN || error == EWOULDBLOCK || error == EINTR) return 0;
    if (size <= 0) {
        place->is_closed = 1;
        place->error = error;
        place->closed_at = at;
        mark(place, first_marked);
        return 1;
    }
    place->stamps[place->num_pieces] = at;
    place->sizes[place->num_pieces] = (uint32_t)size;
    place->num_pieces++;
    place->num_bytes += (int32_t)size;
    place->is_full = size == room || place->num_pieces == MAX_PIECES;
    place->is_over = 0;
    if (!place->is_full && place->is_chunked && size >= 4 && bytes[size - 4] != '\r') return 0;
    mark(place, first_marked);
    if (place->is_full || place->is_awaited) return 1;
    place->is_over = place->is_kept && place->num_turns < MAX_TURNS && is_end_of_stream(place);
    if (place->is_over && departures->num_idle < MAX_DEPARTURES) departures->idle[departures->num_idle++] = place;
    return 0;
}

/* Read what an event is about. There is none for what was there already, so the end of a connection is read at once. */
static int receive(struct place *place, uint32_t events, struct departures *departures, uint64_t *first_marked) {
    const int is_ending = (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
    int due = 0, before;
    do {
        if (place->is_full || place->is_closed) return 1;
        before = place->num_pieces;
        due |= receive_one(place, departures, first_marked);
    } while (is_ending && place->num_pieces > before);
    return due;
}

/* Send what is due. Returns a reason to return: something is, and there is no place to send it from. */
static int send_due(struct departures *departures) {
    while (departures->next != departures->end) {
        struct departure *const departure = &departures->line[departures->next % MAX_DEPARTURES];
        const double at = now();
        if (at < departure->at) return 0;
        if (departures->num_idle == 0) return RING_DUE;
        struct place *const place = departures->idle[departures->num_idle - 1];
        if (place->is_closed || (place->num_pieces && !place->is_over)) return RING_DUE;
        const ssize_t size = send(place->fd, departure->data, (size_t)departure->size, MSG_DONTWAIT | MSG_NOSIGNAL);
        departure->sent_at = at;
        departure->num_sent = size < 0 ? 0 : size;
        departure->number = place->number;
        if (place->num_pieces) place->turns[place->num_turns++] = (uint32_t)place->num_pieces;
        place->is_chunked = place->is_over = 0;
        place->is_awaited = (int32_t)departure->is_awaited;
        departures->num_idle--;
        departures->next++;
        if (size != departure->size) return RING_DUE; /* the rest, or the error, is not for here */
    }
    return now() < departures->ring_at ? 0 : RING_DUE;
}

/* Set the timer to the next instant at which there is something to do; end_at: 0 for never. */
static void arm(struct departures *departures, double end_at) {
    const int is_empty = departures->next == departures->end;
    double at = is_empty ? departures->ring_at : departures->line[departures->next % MAX_DEPARTURES].at;
    if (end_at > 0 && end_at < at) at = end_at;
    if (at == departures->armed_at || at > MAX_INSTANT) return;
    struct itimerspec time = {.it_value = {.tv_sec = (time_t)at}};
    time.it_value.tv_nsec = (long)((at - (double)time.it_value.tv_sec) * 1e9);
    timerfd_settime(departures->timer, TFD_TIMER_ABSTIME, &time, NULL);
    departures->armed_at = at;
}

EXPORT int64_t baton_place_size(void) { return (int64_t)sizeof(struct place); }
EXPORT int64_t baton_departures_size(void) { return (int64_t)sizeof(struct departures); }

/* Watch a descriptor, or watch it again: read it into its place, or (no place) say that something is due there.
   Returns 0 or errno. */
EXPORT int baton_watch(int poll, int fd, struct place *place, int is_again) {
    struct epoll_event event = {.events = place ? EPOLLIN | EPOLLRDHUP | EPOLLET : EPOLLIN, .data.ptr = place};
    return epoll_ctl(poll, is_again ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &event) ? errno : 0;
}

/* Watch a timer, which says when a departure is due. Returns 0 or errno. */
EXPORT int baton_watch_timer(int poll, struct departures *departures) {
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.ptr = departures};
    return epoll_ctl(poll, EPOLL_CTL_ADD, departures->timer, &event) ? errno : 0;
}

/* Send and receive until something is due, timeout_s are over (there is no end if negative), or a signal has come.

   Returns what is due, and in first_marked the number of a place with something to look at, which knows the next one. */
EXPORT int baton_carry(int poll, double timeout_s, struct departures *departures, uint64_t *first_marked) {
    const double end_at = timeout_s > 0 ? now() + timeout_s : 0;
    *first_marked = 0;
    for (;;) {
        struct epoll_event events[MAX_EVENTS];
        int due = send_due(departures);
        const int may_wait = !due && timeout_s != 0;
        if (may_wait) arm(departures, end_at);
        const int count = epoll_wait(poll, events, MAX_EVENTS, may_wait ? -1 : 0);
        for (int i = 0; i < count; i++) {
            void *const of = events[i].data.ptr;
            if (of == NULL)
                due |= REST_DUE;
            else if (of == departures)
                departures->armed_at = 0; /* it may have rung a moment too early */
            else if (receive(of, events[i].events, departures, first_marked))
                due |= PLACE_DUE;
        }
        if (count <= 0 || due || (end_at > 0 && now() >= end_at)) return due;
    }
}
