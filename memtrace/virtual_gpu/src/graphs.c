/* Graphs: how many nodes one has, and the objects that it keeps alive. */
#include "vgpu.h"

#include <stdlib.h>

typedef struct Held {
    struct Held *next;
    UserObject *object;
} Held;

struct Graph {
    Held *held;
    size_t nodes;
};

struct UserObject {
    void *value;
    void (*destroy)(void *);
    unsigned references;
};

int vgpu_graph_create(Graph **graph)
{
    *graph = calloc(1, sizeof **graph);
    return *graph == NULL ? OUT_OF_MEMORY : OK;
}

void vgpu_graph_add_node(Graph *graph)
{
    graph->nodes++;
}

size_t vgpu_graph_nodes(const Graph *graph)
{
    return graph->nodes;
}

int vgpu_graph_instantiate(Graph **executable, Graph *graph)
{
    if (graph == NULL)
        return INVALID_VALUE;
    int error = vgpu_graph_create(executable);
    for (const Held *held = graph->held; held != NULL && error == OK; held = held->next)
        error = vgpu_graph_retain(*executable, held->object, 1, false);
    return error;
}

int vgpu_graph_destroy(Graph *graph)
{
    if (graph == NULL)
        return INVALID_VALUE;
    for (Held *held = graph->held, *next; held != NULL; held = next) {
        next = held->next;
        vgpu_user_object_release(held->object, 1);
        free(held);
    }
    free(graph);
    return OK;
}

int vgpu_user_object_create(UserObject **made, void *value, void (*destroy)(void *), unsigned count)
{
    UserObject *object = malloc(sizeof *object);
    if (object == NULL)
        return OUT_OF_MEMORY;
    *object = (UserObject){value, destroy, count};
    *made = object;
    return OK;
}

int vgpu_user_object_release(UserObject *object, unsigned count)
{
    if (__atomic_sub_fetch(&object->references, count, __ATOMIC_ACQ_REL) == 0) {
        object->destroy(object->value);
        free(object);
    }
    return OK;
}

int vgpu_graph_retain(Graph *graph, UserObject *object, unsigned count, bool move)
{
    if (graph == NULL || object == NULL)
        return INVALID_VALUE;
    for (unsigned i = 0; i < count; i++) {
        Held *held = malloc(sizeof *held);
        if (held == NULL)
            return OUT_OF_MEMORY;
        *held = (Held){graph->held, object};
        graph->held = held;
    }
    if (!move)
        __atomic_add_fetch(&object->references, count, __ATOMIC_RELAXED);
    return OK;
}
