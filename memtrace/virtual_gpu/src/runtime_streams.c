/* The CUDA runtime: streams, events and graphs. */
#include "runtime.h"

EXPORT int cudaStreamCreate(Stream **stream)
{
    return runtime_result(vgpu_stream_create(stream, 0, 0));
}

EXPORT int cudaStreamCreateWithFlags(Stream **stream, unsigned flags)
{
    return runtime_result(vgpu_stream_create(stream, flags, 0));
}

EXPORT int cudaStreamCreateWithPriority(Stream **stream, unsigned flags, int priority)
{
    return runtime_result(vgpu_stream_create(stream, flags, priority));
}

EXPORT int cudaStreamDestroy(Stream *stream)
{
    return runtime_result(vgpu_stream_destroy(stream));
}

EXPORT int cudaStreamGetPriority(Stream *stream, int *priority)
{
    return runtime_result(vgpu_stream_priority(stream, priority));
}

EXPORT int cudaStreamQuery(Stream *stream)
{
    return runtime_result(vgpu_stream_query(stream));
}

EXPORT int cudaStreamSynchronize(Stream *stream)
{
    return runtime_result(vgpu_stream_synchronize(stream));
}

EXPORT int cudaDeviceSynchronize(void)
{
    return runtime_result(vgpu_device_synchronize());
}

EXPORT int cudaStreamWaitEvent(Stream *stream, Event *event, unsigned flags)
{
    (void)flags;
    return runtime_result(vgpu_stream_wait(stream, event));
}

EXPORT int cudaEventCreate(Event **event)
{
    return runtime_result(vgpu_event_create(event, 0));
}

EXPORT int cudaEventCreateWithFlags(Event **event, unsigned flags)
{
    return runtime_result(vgpu_event_create(event, flags));
}

EXPORT int cudaEventDestroy(Event *event)
{
    return runtime_result(vgpu_event_destroy(event));
}

EXPORT int cudaEventRecord(Event *event, Stream *stream)
{
    return runtime_result(vgpu_event_record(event, stream));
}

EXPORT int cudaEventRecordWithFlags(Event *event, Stream *stream, unsigned flags)
{
    (void)flags;
    return runtime_result(vgpu_event_record(event, stream));
}

EXPORT int cudaEventQuery(Event *event)
{
    return runtime_result(vgpu_event_query(event));
}

EXPORT int cudaEventSynchronize(Event *event)
{
    return runtime_result(vgpu_event_synchronize(event));
}

EXPORT int cudaEventElapsedTime(float *milliseconds, Event *start, Event *end)
{
    return runtime_result(vgpu_event_elapsed(milliseconds, start, end));
}

EXPORT int cudaEventElapsedTime_v2(float *milliseconds, Event *start, Event *end)
{
    return runtime_result(vgpu_event_elapsed(milliseconds, start, end));
}

EXPORT int cudaLaunchHostFunc(Stream *stream, void (*function)(void *), void *data)
{
    int error = vgpu_submit(stream), status = 0;
    if (error == OK && vgpu_capture_info(stream, &status, NULL, NULL) == OK && status == 0)
        function(data);
    return runtime_result(error);
}

EXPORT int cudaStreamAddCallback(Stream *stream, void (*callback)(Stream *, int, void *),
                                 void *data, unsigned flags)
{
    (void)flags;
    int error = vgpu_submit(stream);
    if (error == OK)
        callback(stream, OK, data);
    return runtime_result(error);
}

EXPORT int cudaThreadExchangeStreamCaptureMode(int *mode)
{
    static __thread int current;
    int before = current;
    current = *mode;
    *mode = before;
    return OK;
}

EXPORT int cudaStreamBeginCapture(Stream *stream, int mode)
{
    return runtime_result(vgpu_capture_begin(stream, NULL, mode));
}

EXPORT int cudaStreamBeginCaptureToGraph(Stream *stream, Graph *graph, const void *dependencies,
                                         const void *edges, size_t count, int mode)
{
    (void)dependencies, (void)edges, (void)count;
    return runtime_result(vgpu_capture_begin(stream, graph, mode));
}

EXPORT int cudaStreamEndCapture(Stream *stream, Graph **graph)
{
    return runtime_result(vgpu_capture_end(stream, graph));
}

EXPORT int cudaStreamIsCapturing(Stream *stream, int *status)
{
    return runtime_result(vgpu_capture_info(stream, status, NULL, NULL));
}

static int capture_info(Stream *stream, int *status, unsigned long long *id, Graph **graph,
                        void **dependencies, size_t *count)
{
    if (dependencies != NULL)
        *dependencies = NULL;
    if (count != NULL)
        *count = 0;
    return runtime_result(vgpu_capture_info(stream, status, id, graph));
}

#if CUDA_VERSION < 13000
EXPORT int cudaStreamGetCaptureInfo_v2(Stream *stream, int *status, unsigned long long *id,
                                       Graph **graph, void **dependencies, size_t *count)
{
    return capture_info(stream, status, id, graph, dependencies, count);
}
#define cudaStreamGetCaptureInfo cudaStreamGetCaptureInfo_v3
#endif

EXPORT int cudaStreamGetCaptureInfo(Stream *stream, int *status, unsigned long long *id,
                                    Graph **graph, void **dependencies, void **edges, size_t *count)
{
    if (edges != NULL)
        *edges = NULL;
    return capture_info(stream, status, id, graph, dependencies, count);
}

EXPORT int cudaStreamUpdateCaptureDependencies(Stream *stream, ...)
{
    (void)stream;
    return OK;
}

EXPORT int cudaGraphCreate(Graph **graph, unsigned flags)
{
    (void)flags;
    return runtime_result(vgpu_graph_create(graph));
}

EXPORT int cudaGraphDestroy(Graph *graph)
{
    return runtime_result(vgpu_graph_destroy(graph));
}

EXPORT int cudaGraphInstantiate(Graph **executable, Graph *graph, unsigned long long flags)
{
    (void)flags;
    return runtime_result(vgpu_graph_instantiate(executable, graph));
}

EXPORT int cudaGraphInstantiateWithFlags(Graph **executable, Graph *graph, unsigned long long flags)
{
    (void)flags;
    return runtime_result(vgpu_graph_instantiate(executable, graph));
}

EXPORT int cudaGraphExecDestroy(Graph *executable)
{
    return runtime_result(vgpu_graph_destroy(executable));
}

EXPORT int cudaGraphLaunch(Graph *executable, Stream *stream)
{
    return runtime_result(executable == NULL ? INVALID_VALUE : vgpu_submit(stream));
}

EXPORT int cudaGraphUpload(Graph *executable, Stream *stream)
{
    return runtime_result(executable == NULL ? INVALID_VALUE : vgpu_submit(stream));
}

/* All nodes of a graph are one: what they would do is not kept. */
EXPORT int cudaGraphGetNodes(Graph *graph, void **nodes, size_t *count)
{
    if (nodes == NULL)
        *count = vgpu_graph_nodes(graph);
    for (size_t i = 0; nodes != NULL && i < *count; i++)
        nodes[i] = graph;
    return OK;
}

EXPORT int cudaGraphNodeGetDependencies(void *node, void **dependencies, size_t *count)
{
    (void)node, (void)dependencies;
    *count = 0;
    return OK;
}

EXPORT int cudaUserObjectCreate(UserObject **object, void *value, void (*destroy)(void *),
                                unsigned count, unsigned flags)
{
    (void)flags;
    return runtime_result(vgpu_user_object_create(object, value, destroy, count));
}

EXPORT int cudaUserObjectRelease(UserObject *object, unsigned count)
{
    return runtime_result(vgpu_user_object_release(object, count));
}

EXPORT int cudaGraphRetainUserObject(Graph *graph, UserObject *object, unsigned count,
                                     unsigned flags)
{
    return runtime_result(vgpu_graph_retain(graph, object, count, flags & 1));
}
