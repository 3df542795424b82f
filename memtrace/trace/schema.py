"""Tables and manifests of a trace.

A run is a folder::

    NAME.memtrace/
        manifest.json          the run: command, exit, checksums of every file when complete
        samples.arrow          process memory, sampled from outside
        PID-START/             one folder a process (PID-START-rank1 of a distributed launch)
            manifest.json      versions, options, what was not seen
            events.arrow  contexts.arrow  scopes.arrow  stacks.arrow  samples.arrow  requests.arrow
            boundaries.arrow  segments.arrow  blocks.arrow

Every table is an Arrow IPC stream, appended to in small compressed batches, so that a process that
is killed leaves a readable trace up to its last batch. What changes rarely is interned: an event
names a row of ``contexts``, a context names a row of ``scopes`` and ``stacks``. Rows are numbered
from 0 in the order in which they were written, and a batch of events is written only after the
rows that it names.
"""

from enum import IntEnum

import pyarrow as pa


class Action(IntEnum):
    """What an event did."""

    ALLOC = 0
    FREE = 1
    RETAG = 2
    SEGMENT_ALLOC = 3  # the allocator took a segment from the device
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5  # the same in an expandable segment
    SEGMENT_UNMAP = 6
    RETRY = 7  # the device was full: the allocator returned what it had cached and tried again
    OOM = 8  # id: bytes that the device had free; bytes: what the allocator asked it for
    FREE_REQUESTED = 9  # a free whose block waits for another stream
    FREE_COMPLETED = 10  # that block can be used again


class State(IntEnum):
    """What a block of a caching allocator is."""

    FREE = 0
    ALLOCATED = 1
    PENDING = 2  # freed, and waiting for a stream


#: The actions that move tensor bytes.
TENSOR_ACTIONS = (Action.ALLOC, Action.FREE, Action.FREE_REQUESTED, Action.RETAG)
#: Those after which the bytes belong to no component.
FREES = (Action.FREE, Action.FREE_REQUESTED)


TABLES: dict[str, pa.Schema] = {
    # Events of one device stand in the order in which they happened.
    # id: the storage (a running number) or, where an allocator was recorded, the address.
    # bytes: allocated bytes that the event moves; of a free or retag, those of its storage. Of a
    # caching allocator's block that is its size; requested is what was asked for.
    "events": pa.schema(
        [
            ("time_us", pa.int64()),  # since the run's epoch
            ("id", pa.int64()),
            ("bytes", pa.int64()),
            ("requested", pa.int64()),
            ("context", pa.int32()),
        ]
    ),
    # pool: of a private pool of the allocator, its id; otherwise null.
    # component: what the bytes join (alloc, retag) or leave (free).
    # previous: of a retag, the component that they leave; otherwise null.
    "contexts": pa.schema(
        [
            ("action", pa.int8()),
            ("device", pa.string()),
            ("stream", pa.int64()),
            ("pool", pa.string()),
            ("component", pa.string()),
            ("previous", pa.string()),
            ("scope", pa.int32()),
            ("stack", pa.int32()),  # -1: not recorded
        ]
    ),
    # Row 0 is the process itself (parent -1).
    # kind: process, request, phase, layer, chunk, module, op; class: of a module or layer;
    # component: the user's code chose that component for what happens inside; tag, compile,
    # internal: what a snapshot of PyTorch's allocator says of a place (docs/snapshots.md).
    "scopes": pa.schema([("parent", pa.int32()), ("kind", pa.string()), ("name", pa.string())]),
    # Innermost frame first, each "file:line:function".
    "stacks": pa.schema([("frames", pa.list_(pa.string()))]),
    # source: rss, hwm (its high-water mark), nvml:UUID of a GPU, allocated:DEVICE, reserved:DEVICE,
    # …; start: from here on pid is the process that started at clock tick ``value``.
    # pid null: of no process (nvml-used:UUID: of a GPU, by whomever).
    # event: number of events before the sample, where the sampler knows it.
    "samples": pa.schema(
        [
            ("time_us", pa.int64()),
            ("pid", pa.int64()),
            ("source", pa.string()),
            ("event", pa.int64()),
            ("value", pa.int64()),
        ]
    ),
    "requests": pa.schema(
        [
            ("name", pa.string()),
            ("prompt_tokens", pa.int64()),
            ("generated_tokens", pa.int64()),
            ("start_us", pa.int64()),
            ("first_token_us", pa.int64()),
            ("end_us", pa.int64()),
            ("outcome", pa.string()),  # ok, oom, error
        ]
    ),
    # What the caching allocator of a CUDA device says of itself right after a request: its
    # counters, in bytes where nothing else is said, null where it has none. Peaks are those since
    # the process began or the program set them back.
    # event: number of events before; null: another thread may allocate, or no event was recorded.
    # snapshot: its segments and blocks then; null: not taken. One that is as the one before has
    # its number.
    "boundaries": pa.schema(
        [
            ("request", pa.int64()),  # row of requests
            ("device", pa.string()),
            ("event", pa.int64()),
            ("snapshot", pa.int64()),
            ("allocated", pa.int64()),
            ("reserved", pa.int64()),
            ("active", pa.int64()),
            ("requested", pa.int64()),
            ("inactive_split", pa.int64()),
            ("allocated_peak", pa.int64()),
            ("reserved_peak", pa.int64()),
            ("inactive_split_peak", pa.int64()),
            ("segments", pa.int64()),  # how many
            ("retries", pa.int64()),  # how many since the process began
            ("ooms", pa.int64()),
        ]
    ),
    "segments": pa.schema(
        [
            ("snapshot", pa.int64()),
            ("address", pa.int64()),
            ("bytes", pa.int64()),
            ("stream", pa.int64()),
            ("pool", pa.string()),  # as in contexts
            ("expandable", pa.int8()),  # 1: a mapped range of an expandable one
        ]
    ),
    # state: a State.
    # component: as the recorder booked it; null: free, or not booked.
    # stack: of who allocated it, -1: not recorded here.
    "blocks": pa.schema(
        [
            ("snapshot", pa.int64()),
            ("address", pa.int64()),
            ("bytes", pa.int64()),
            ("requested", pa.int64()),  # 0 where free
            ("state", pa.int8()),
            ("component", pa.string()),
            ("stack", pa.int32()),
        ]
    ),
}
