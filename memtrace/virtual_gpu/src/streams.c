/* Streams, events and captured graphs: what is done when, without anything being computed.

   Each submission to a stream has a number. A stream's work is done up to a number once the host
   waited for it, once QUEUE_LENGTH further submissions followed (a real queue is no longer), or
   once the host asks for it twice with nothing submitted in between, as a program that polls does.
   So memory that another stream used stays in use for a while, as on a real device, and nothing
   that polls waits for ever. */
#include "vgpu.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

enum { QUEUE_LENGTH = 1024, NON_BLOCKING = 1 };

/* Which work of another stream this one waits for. */
typedef struct Wait {
    struct Wait *next;
    Stream *stream;
    uint64_t number, at;
} Wait;

struct Stream {
    Stream *next; /* in the list of all; a destroyed stream stays there, its events may live */
    int device;
    unsigned flags;
    int priority;
    bool destroyed;
    uint64_t last, done;
    Wait *waits; /* the newest first */
    unsigned added; /* to them since old ones were dropped */
    uint64_t capture; /* id of the capture it is part of, 0 without */
};

struct Event {
    Stream *stream; /* NULL before it is recorded */
    uint64_t number, asked_at, nanoseconds, capture;
};

/* A capture that goes on. */
typedef struct Capture {
    struct Capture *next;
    uint64_t id;
    Stream *origin;
    Graph *graph;
    int mode; /* 0: global, 1: of the thread, 2: relaxed */
    bool invalid;
} Capture;

static Stream *streams;
static Stream defaults[VGPU_MAX_DEVICES];
static Capture *captures;
static uint64_t submitted = 1, capture_ids;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static Stream *stream_of(Stream *handle)
{
    if ((uintptr_t)handle > 2) /* 0, 1 and 2 name the default streams */
        return handle->destroyed ? NULL : handle;
    Stream *stream = &defaults[vgpu_current_device()];
    stream->device = vgpu_current_device();
    return stream;
}

static Capture *capture_of(const Stream *stream)
{
    Capture *capture = stream->capture ? captures : NULL;
    while (capture != NULL && capture->id != stream->capture)
        capture = capture->next;
    return capture;
}

static void finish(Stream *stream, uint64_t number)
{
    if (stream->done >= number)
        return;
    stream->done = number;
    for (Wait **link = &stream->waits; *link != NULL;) {
        Wait *wait = *link;
        if (wait->at > number) {
            link = &wait->next;
            continue;
        }
        *link = wait->next;
        finish(wait->stream, wait->number);
        free(wait);
        link = &stream->waits; /* the recursion may have changed the list */
    }
}

static bool is_done(const Stream *stream, uint64_t number)
{
    return number <= stream->done || submitted - number >= QUEUE_LENGTH;
}

/* Drops the waits that are over by their age. */
static void forget_old(Stream *stream)
{
    stream->added = 0;
    Wait **link = &stream->waits;
    while (*link != NULL && submitted - (*link)->at < QUEUE_LENGTH)
        link = &(*link)->next;
    Wait *old = *link;
    *link = NULL;
    for (Wait *next; old != NULL; old = next) {
        next = old->next;
        free(old);
    }
}

/* The error of an operation that a capture forbids, after which the capture is no longer valid. */
static int forbid(Stream *stream)
{
    Capture *capture = capture_of(stream);
    if (capture == NULL)
        return OK;
    capture->invalid = true;
    return CAPTURE_UNSUPPORTED;
}

int vgpu_stream_create(Stream **made, unsigned flags, int priority)
{
    if (vgpu_device(vgpu_current_device()) == NULL)
        return NO_DEVICE;
    Stream *stream = calloc(1, sizeof *stream);
    if (stream == NULL)
        return OUT_OF_MEMORY;
    stream->device = vgpu_current_device();
    stream->flags = flags;
    stream->priority = priority;
    pthread_mutex_lock(&lock);
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&lock);
    *made = stream;
    return OK;
}

int vgpu_stream_destroy(Stream *handle)
{
    Stream *stream = stream_of(handle);
    if (stream == NULL || stream != handle)
        return INVALID_HANDLE;
    stream->destroyed = true;
    return OK;
}

int vgpu_stream_priority(Stream *handle, int *priority)
{
    Stream *stream = stream_of(handle);
    if (stream == NULL)
        return INVALID_HANDLE;
    *priority = stream->priority;
    return OK;
}

int vgpu_stream_device(Stream *handle)
{
    Stream *stream = stream_of(handle);
    return stream == NULL ? -1 : stream->device;
}

int vgpu_submit(Stream *handle)
{
    Stream *stream = stream_of(handle);
    if (stream == NULL)
        return INVALID_HANDLE;
    stream->last = __atomic_add_fetch(&submitted, 1, __ATOMIC_RELAXED);
    if (stream->capture) {
        pthread_mutex_lock(&lock);
        Capture *capture = capture_of(stream);
        if (capture != NULL)
            vgpu_graph_add_node(capture->graph);
        pthread_mutex_unlock(&lock);
    }
    return OK;
}

int vgpu_stream_query(Stream *handle)
{
    Event event = {0};
    int error = vgpu_event_record(&event, handle);
    if (error)
        return error;
    Stream *stream = event.stream;
    pthread_mutex_lock(&lock);
    error = forbid(stream);
    if (error == OK && !is_done(stream, stream->last)) {
        finish(stream, stream->last); /* asked once more, it is done */
        error = NOT_READY;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

int vgpu_stream_synchronize(Stream *handle)
{
    Stream *stream = stream_of(handle);
    if (stream == NULL)
        return INVALID_HANDLE;
    pthread_mutex_lock(&lock);
    int error = forbid(stream);
    if (error == OK) {
        finish(stream, stream->last);
        if (stream == &defaults[stream->device])
            for (Stream *other = streams; other != NULL; other = other->next)
                if (other->device == stream->device && !(other->flags & NON_BLOCKING))
                    finish(other, other->last);
    }
    pthread_mutex_unlock(&lock);
    if (error == OK)
        vgpu_pools_synchronized();
    return error;
}

int vgpu_device_synchronize(void)
{
    int device = vgpu_current_device(), error = OK;
    if (vgpu_device(device) == NULL)
        return NO_DEVICE;
    pthread_mutex_lock(&lock);
    for (Capture *capture = captures; capture != NULL; capture = capture->next)
        if (capture->origin->device == device && capture->mode == 0) {
            capture->invalid = true;
            error = CAPTURE_UNSUPPORTED;
        }
    if (error == OK) {
        finish(&defaults[device], defaults[device].last);
        for (Stream *stream = streams; stream != NULL; stream = stream->next)
            if (stream->device == device)
                finish(stream, stream->last);
    }
    pthread_mutex_unlock(&lock);
    if (error == OK)
        vgpu_pools_synchronized();
    return error;
}

static uint64_t nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

int vgpu_event_create(Event **event, unsigned flags)
{
    (void)flags;
    *event = calloc(1, sizeof **event);
    return *event == NULL ? OUT_OF_MEMORY : OK;
}

int vgpu_event_destroy(Event *event)
{
    if (event == NULL)
        return INVALID_HANDLE;
    free(event);
    return OK;
}

int vgpu_event_record(Event *event, Stream *handle)
{
    Stream *stream = stream_of(handle);
    if (stream == NULL || event == NULL)
        return INVALID_HANDLE;
    event->stream = stream;
    event->number = stream->last;
    event->asked_at = 0;
    event->nanoseconds = nanoseconds();
    event->capture = stream->capture;
    return OK;
}

int vgpu_event_query(Event *event)
{
    if (event == NULL)
        return INVALID_HANDLE;
    if (event->stream == NULL)
        return OK;
    int error = OK;
    pthread_mutex_lock(&lock);
    if (event->capture) {
        error = CAPTURE_UNSUPPORTED;
    } else if (!is_done(event->stream, event->number)) {
        if (event->asked_at == submitted)
            finish(event->stream, event->number);
        else
            error = NOT_READY;
        event->asked_at = submitted;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

int vgpu_event_synchronize(Event *event)
{
    if (event == NULL)
        return INVALID_HANDLE;
    if (event->stream == NULL)
        return OK;
    if (event->capture)
        return CAPTURE_UNSUPPORTED;
    pthread_mutex_lock(&lock);
    finish(event->stream, event->number);
    pthread_mutex_unlock(&lock);
    return OK;
}

/* The host's time between the two records, never 0: programs divide by it. */
int vgpu_event_elapsed(float *milliseconds, Event *start, Event *end)
{
    if (start == NULL || end == NULL || start->stream == NULL || end->stream == NULL)
        return INVALID_HANDLE;
    float elapsed = (float)((int64_t)(end->nanoseconds - start->nanoseconds) / 1e6);
    *milliseconds = elapsed > 0.001f || elapsed < 0 ? elapsed : 0.001f;
    return OK;
}

int vgpu_stream_wait(Stream *handle, Event *event)
{
    Stream *stream = stream_of(handle);
    if (stream == NULL || event == NULL)
        return INVALID_HANDLE;
    if (event->stream == NULL || event->stream == stream)
        return OK;
    int error = OK;
    pthread_mutex_lock(&lock);
    if (event->capture) {
        stream->capture = event->capture; /* it joins the capture */
    } else if (!is_done(event->stream, event->number)) {
        if (++stream->added > QUEUE_LENGTH)
            forget_old(stream);
        Wait *wait = malloc(sizeof *wait);
        error = wait == NULL ? OUT_OF_MEMORY : OK;
        if (error == OK) {
            *wait = (Wait){stream->waits, event->stream, event->number, 0};
            wait->at = stream->last = __atomic_add_fetch(&submitted, 1, __ATOMIC_RELAXED);
            stream->waits = wait;
        }
    }
    pthread_mutex_unlock(&lock);
    return error;
}

int vgpu_capture_begin(Stream *handle, Graph *into, int mode)
{
    Stream *stream = stream_of(handle);
    if (stream == NULL)
        return INVALID_HANDLE;
    if ((uintptr_t)handle <= 2)
        return CAPTURE_UNSUPPORTED;
    if (stream->capture)
        return ILLEGAL_STATE;
    Capture *capture = calloc(1, sizeof *capture);
    if (capture == NULL || (into == NULL && vgpu_graph_create(&into) != OK)) {
        free(capture);
        return OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&lock);
    capture->id = stream->capture = ++capture_ids;
    capture->origin = stream;
    capture->graph = into;
    capture->mode = mode;
    capture->next = captures;
    captures = capture;
    pthread_mutex_unlock(&lock);
    return OK;
}

int vgpu_capture_end(Stream *handle, Graph **graph)
{
    Stream *stream = stream_of(handle);
    if (stream == NULL)
        return INVALID_HANDLE;
    pthread_mutex_lock(&lock);
    Capture *capture = capture_of(stream);
    if (capture == NULL || capture->origin != stream) {
        pthread_mutex_unlock(&lock);
        return ILLEGAL_STATE;
    }
    for (Stream *other = streams; other != NULL; other = other->next)
        if (other->capture == capture->id)
            other->capture = 0;
    Capture **link = &captures;
    while (*link != capture)
        link = &(*link)->next;
    *link = capture->next;
    pthread_mutex_unlock(&lock);
    int error = capture->invalid ? CAPTURE_INVALIDATED : OK;
    if (graph != NULL)
        *graph = error ? NULL : capture->graph;
    if (error)
        vgpu_graph_destroy(capture->graph);
    free(capture);
    return error;
}

int vgpu_capture_info(Stream *handle, int *status, unsigned long long *id, Graph **graph)
{
    Stream *stream = stream_of(handle);
    if (stream == NULL)
        return INVALID_HANDLE;
    pthread_mutex_lock(&lock);
    const Capture *capture = capture_of(stream);
    *status = capture == NULL ? 0 : capture->invalid ? 2 : 1;
    if (id != NULL)
        *id = capture == NULL ? 0 : capture->id;
    if (graph != NULL)
        *graph = capture == NULL ? NULL : capture->graph;
    pthread_mutex_unlock(&lock);
    return OK;
}
