/* Receives on many connections, and returns only when somebody has to look: scripts/load/receiver.py.

   Every piece that comes is read at once and kept with the instant right after it was read, in the place of its
   connection. Places with something to look at are marked: where the body of a chunked response is coming, a piece that
   may be its end is (its last four bytes begin with \r, or it is shorter than that), elsewhere any. Whoever waits for a
   connection is told at once; of others the caller hears when there is another reason to return. The end of a
   connection, an error, a full place, and something to do for the rest of the process always are one.

   One thread does everything, and all memory is the caller's. epoll keeps the address of a place (of the rest of the
   process: none), so a descriptor must be taken out of it before it is closed, and before its place goes. As nobody can
   do either between epoll_wait and recv, no event is of another connection that has got the same descriptor. */

#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

enum { MAX_EVENTS = 64, MAX_PIECES = 256, MAX_BYTES = 32768 };
enum { PLACE_DUE = 1, REST_DUE = 2 };

/* Of one connection; as in receiver.py. */
struct place {
    int32_t fd;
    int32_t is_chunked; /* the body of a chunked response is coming */
    int32_t is_awaited; /* somebody waits for its end */
    int32_t is_marked;
    int32_t is_closed; /* by the peer, or by the error beside it; no more will come */
    int32_t error;     /* errno */
    int32_t num_pieces, num_bytes;
    uint64_t number;      /* not 0 */
    uint64_t next_marked; /* number of another one; 0: none */
    double closed_at;     /* seconds of CLOCK_MONOTONIC, as all instants */
    double stamps[MAX_PIECES];
    uint32_t sizes[MAX_PIECES];
    char bytes[MAX_BYTES];
};

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* Milliseconds until an instant, upwards; as epoll_wait takes them. */
static int left_ms(double end_at) {
    const double left = (end_at - now()) * 1e3;
    return left <= 0 ? 0 : left < 1e9 ? (int)left + 1 : 1000000000;
}

static void mark(struct place *place, uint64_t *first_marked) {
    if (place->is_marked) return;
    place->is_marked = 1;
    place->next_marked = *first_marked;
    *first_marked = place->number;
}

/* Read once. Returns whether that is a reason to return. */
static int receive_one(struct place *place, uint64_t *first_marked) {
    const int room = MAX_BYTES - place->num_bytes;
    if (room <= 0 || place->num_pieces >= MAX_PIECES || place->is_closed) { /* epoll will name it again */
        mark(place, first_marked);
        return 1;
    }
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
    if (place->is_chunked && size >= 4 && bytes[size - 4] != '\r') return 0;
    mark(place, first_marked);
    return place->is_awaited;
}

EXPORT int64_t baton_place_size(void) { return (int64_t)sizeof(struct place); }

/* Watch a descriptor: read it into its place, or (no place) say that something is due there. Returns 0 or errno. */
EXPORT int baton_watch(int poll, int fd, struct place *place) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = place};
    return epoll_ctl(poll, EPOLL_CTL_ADD, fd, &event) ? errno : 0;
}

/* Receive until something is due, timeout_s are over (there is no end if negative), or a signal has come.

   Returns what is due, and in first_marked the number of a place with something to look at, which knows the next one. */
EXPORT int baton_receive(int poll, double timeout_s, uint64_t *first_marked) {
    const double end_at = timeout_s > 0 ? now() + timeout_s : 0;
    int wait_ms = timeout_s > 0 ? left_ms(end_at) : timeout_s < 0 ? -1 : 0;
    *first_marked = 0;
    for (;;) {
        struct epoll_event events[MAX_EVENTS];
        const int count = epoll_wait(poll, events, MAX_EVENTS, wait_ms);
        int due = 0;
        for (int i = 0; i < count; i++) {
            struct place *const place = events[i].data.ptr;
            if (place == NULL)
                due |= REST_DUE;
            else if (receive_one(place, first_marked))
                due |= PLACE_DUE;
        }
        if (count <= 0 || due) return due;
        if (timeout_s > 0) wait_ms = left_ms(end_at);
    }
}
