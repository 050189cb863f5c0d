/* A FAKE of NVIDIA's driver library: the calls of CUDA IPC over host memory, for tests on machines without a GPU.
 *
 * "Device" memory is a memfd, and its IPC handle names the process and the descriptor. As with the real driver, copies
 * are made later than they are asked for (here: when an event behind them is waited for), a process cannot open its own
 * memory, and memory that is opened twice has one address and a count. FAKE_CUDA_FAIL in the environment, or
 * fake_cuda_fail(), names a call that fails.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define FAILED 999
#define INVALID 1
#define MAX 4096

typedef uint64_t address;
typedef struct { char magic[8]; int32_t pid; int32_t fd; uint64_t size; char rest[40]; } handle;
typedef struct { address at; size_t size; int fd; int pid; int opened; } allocation;
typedef struct { void *to; const void *from; size_t size; } copy;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static allocation allocations[MAX];
static const char MAGIC[8] = "FAKECUDA";
static char failing[64];

struct stream { copy queue[MAX]; int count; };
struct event { struct stream *stream; int upto; };

API void fake_cuda_fail(const char *name) { snprintf(failing, sizeof failing, "%s", name); }

static int fails(const char *name) {
    const char *wanted = failing[0] ? failing : getenv("FAKE_CUDA_FAIL");
    return wanted && !strcmp(wanted, name);
}
#define MAY_FAIL if (fails(__func__)) return FAILED

API int cuInit(unsigned flags) { MAY_FAIL; return flags ? INVALID : 0; }
API int cuGetErrorString(int status, const char **text) {
    *text = status == FAILED ? "the fake driver was told to fail" : "invalid argument";
    return 0;
}
API int cuDeviceGetCount(int *count) { *count = 2; return 0; }
API int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal < 0 || ordinal > 1 ? 101 : 0; }
API int cuDeviceGetUuid_v2(char *uuid, int device) {
    const char *other = getenv("FAKE_CUDA_UUIDS"); /* a letter for each device */
    memset(uuid, other ? other[device] : 'A' + device, 16);
    return 0;
}
API int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(intptr_t)(device + 1); return 0; }
API int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return 0; }

static __thread int depth;
API int cuCtxPushCurrent_v2(void *context) { depth++; return context ? 0 : INVALID; }
API int cuCtxPopCurrent_v2(void **context) { *context = 0; return depth-- > 0 ? 0 : INVALID; }
#define NEEDS_CONTEXT if (depth <= 0) return 201

static allocation *find(address at) {
    for (int i = 0; i < MAX; i++)
        if (allocations[i].size && allocations[i].at <= at && at < allocations[i].at + allocations[i].size)
            return &allocations[i];
    return 0;
}
static allocation *add(address at, size_t size, int fd, int pid) {
    for (int i = 0; i < MAX; i++)
        if (!allocations[i].size) {
            allocations[i] = (allocation){at, size, fd, pid, pid != 0};
            return &allocations[i];
        }
    abort();
}

API int cuMemAlloc_v2(address *at, size_t size) {
    NEEDS_CONTEXT; MAY_FAIL;
    int fd = memfd_create("fake-device", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, size)) return 2;
    void *memory = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) return 2;
    pthread_mutex_lock(&lock);
    *at = add((address)memory, size, fd, 0)->at;
    pthread_mutex_unlock(&lock);
    return 0;
}
API int cuMemFree_v2(address at) {
    NEEDS_CONTEXT;
    pthread_mutex_lock(&lock);
    allocation *found = find(at);
    int status = found && found->at == at && !found->pid ? 0 : INVALID;
    if (!status) {
        munmap((void *)at, found->size);
        close(found->fd);
        found->size = 0;
    }
    pthread_mutex_unlock(&lock);
    return status;
}
API int cuMemGetAddressRange_v2(address *base, size_t *size, address at) {
    NEEDS_CONTEXT; MAY_FAIL;
    pthread_mutex_lock(&lock);
    allocation *found = find(at);
    if (found) { *base = found->at; *size = found->size; }
    pthread_mutex_unlock(&lock);
    return found ? 0 : INVALID;
}

API int cuIpcGetMemHandle(handle *made, address at) {
    NEEDS_CONTEXT; MAY_FAIL;
    allocation *found = find(at);
    if (!found || found->pid) return INVALID;
    *made = (handle){.pid = getpid(), .fd = found->fd, .size = found->size};
    memcpy(made->magic, MAGIC, sizeof MAGIC);
    return 0;
}
API int cuIpcOpenMemHandle_v2(address *at, handle given, unsigned flags) {
    NEEDS_CONTEXT; MAY_FAIL;
    if (flags != 1 || memcmp(given.magic, MAGIC, sizeof MAGIC) || given.pid == getpid()) return INVALID;
    pthread_mutex_lock(&lock);
    int status = INVALID;
    for (int i = 0; i < MAX; i++)
        if (allocations[i].size && allocations[i].pid == given.pid && allocations[i].fd == given.fd) {
            allocations[i].opened++;
            *at = allocations[i].at;
            status = 0;
        }
    if (status) {
        char path[64];
        snprintf(path, sizeof path, "/proc/%d/fd/%d", given.pid, given.fd);
        int fd = open(path, O_RDWR | O_CLOEXEC);
        void *memory = fd < 0 ? MAP_FAILED : mmap(0, given.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (fd >= 0) close(fd);
        if (memory != MAP_FAILED) {
            *at = add((address)memory, given.size, given.fd, given.pid)->at;
            status = 0;
        }
    }
    pthread_mutex_unlock(&lock);
    return status;
}
API int cuIpcCloseMemHandle(address at) {
    NEEDS_CONTEXT; MAY_FAIL;
    pthread_mutex_lock(&lock);
    allocation *found = find(at);
    int status = found && found->at == at && found->pid ? 0 : INVALID;
    if (!status && !--found->opened) {
        munmap((void *)at, found->size);
        found->size = 0;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

API int cuStreamCreate(struct stream **made, unsigned flags) {
    NEEDS_CONTEXT;
    *made = calloc(1, sizeof **made);
    return flags == 1 ? 0 : INVALID;
}
API int cuStreamDestroy_v2(struct stream *stream) { NEEDS_CONTEXT; free(stream); return 0; }
API int cuEventCreate(struct event **made, unsigned flags) {
    NEEDS_CONTEXT;
    *made = calloc(1, sizeof **made);
    return flags == 3 ? 0 : INVALID;
}
API int cuEventDestroy_v2(struct event *event) { NEEDS_CONTEXT; free(event); return 0; }
API int cuEventRecord(struct event *event, struct stream *stream) {
    NEEDS_CONTEXT; MAY_FAIL;
    *event = (struct event){stream, stream->count};
    return 0;
}
API int cuEventSynchronize(struct event *event) {
    NEEDS_CONTEXT; MAY_FAIL;
    struct stream *stream = event->stream;
    for (int i = 0; i < event->upto; i++) memcpy(stream->queue[i].to, stream->queue[i].from, stream->queue[i].size);
    memmove(stream->queue, stream->queue + event->upto, (stream->count - event->upto) * sizeof(copy));
    stream->count -= event->upto;
    return 0;
}
static int later(struct stream *stream, void *to, const void *from, size_t size) {
    if (stream->count == MAX) return 2;
    stream->queue[stream->count++] = (copy){to, from, size};
    return 0;
}
API int cuMemcpyAsync(address to, address from, size_t size, struct stream *stream) {
    NEEDS_CONTEXT; MAY_FAIL;
    return later(stream, (void *)to, (void *)from, size);
}
API int cuMemcpyHtoDAsync_v2(address to, const void *from, size_t size, struct stream *stream) {
    NEEDS_CONTEXT; MAY_FAIL;
    return later(stream, (void *)to, from, size);
}
API int cuMemcpyDtoHAsync_v2(void *to, address from, size_t size, struct stream *stream) {
    NEEDS_CONTEXT; MAY_FAIL;
    return later(stream, to, (void *)from, size);
}
