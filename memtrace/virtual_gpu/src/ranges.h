/* Ranges of addresses that don't overlap, in the order of their addresses. */
#ifndef RANGES_H
#define RANGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    uintptr_t start;
    size_t size;
    uint64_t handle; /* what is mapped there, where that has a meaning */
} Range;

typedef struct {
    Range *ranges;
    size_t count, capacity;
} Ranges;

/* Index of the first range that starts after the address. */
static inline size_t ranges_after(const Ranges *list, uintptr_t address)
{
    size_t low = 0, high = list->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (list->ranges[middle].start <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The range that holds the address; NULL if none does. */
static inline const Range *ranges_around(const Ranges *list, uintptr_t address)
{
    size_t next = ranges_after(list, address);
    if (next == 0)
        return NULL;
    const Range *range = &list->ranges[next - 1];
    return address - range->start < range->size ? range : NULL;
}

static inline bool ranges_insert(Ranges *list, Range range)
{
    if (list->count == list->capacity) {
        size_t capacity = list->capacity ? 2 * list->capacity : 256;
        Range *larger = realloc(list->ranges, capacity * sizeof *larger);
        if (larger == NULL)
            return false;
        list->ranges = larger;
        list->capacity = capacity;
    }
    size_t index = ranges_after(list, range.start);
    memmove(&list->ranges[index + 1], &list->ranges[index],
            (list->count - index) * sizeof range);
    list->ranges[index] = range;
    list->count++;
    return true;
}

static inline void ranges_remove(Ranges *list, size_t index)
{
    list->count--;
    memmove(&list->ranges[index], &list->ranges[index + 1],
            (list->count - index) * sizeof *list->ranges);
}

/* Removes the range that starts at the address and returns its size; 0 if none does. */
static inline size_t ranges_take(Ranges *list, uintptr_t start)
{
    size_t next = ranges_after(list, start);
    if (next == 0 || list->ranges[next - 1].start != start)
        return 0;
    size_t size = list->ranges[next - 1].size;
    ranges_remove(list, next - 1);
    return size;
}

/* The lowest address of a gap of that size, from `first` on and a multiple of `unit`. */
static inline uintptr_t ranges_gap(const Ranges *list, uintptr_t first, size_t size, size_t unit)
{
    uintptr_t start = first;
    for (size_t i = 0; i < list->count && list->ranges[i].start - start < size; i++)
        start = (list->ranges[i].start + list->ranges[i].size + unit - 1) / unit * unit;
    return start;
}

#endif
