"""Tables and manifests of a trace.

A run is a folder::

    NAME.memtrace/
        manifest.json          the run: command, exit, checksums of every file when complete
        samples.arrow          process memory, sampled from outside
        PID/                   one folder a process
            manifest.json      versions, options, what was not seen
            events.arrow  contexts.arrow  scopes.arrow  stacks.arrow  samples.arrow  requests.arrow

Every table is an Arrow IPC stream, appended to in small compressed batches, so that a process that
is killed leaves a readable trace up to its last batch. What changes rarely is interned: an event
names a row of ``contexts``, a context names a row of ``scopes`` and ``stacks``. Rows are numbered
from 0 in the order in which they were written, and a batch of events is written only after the
rows that it names.
"""

from enum import IntEnum

import pyarrow as pa


class Action(IntEnum):
    """What an event did. ``alloc``, ``free`` and ``retag`` move tensor bytes, the rest segments."""

    ALLOC = 0
    FREE = 1
    RETAG = 2
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5
    SEGMENT_UNMAP = 6
    RETRY = 7
    OOM = 8


#: The actions that move tensor bytes.
TENSOR_ACTIONS = (Action.ALLOC, Action.FREE, Action.RETAG)


TABLES: dict[str, pa.Schema] = {
    # id: the storage (a running number) or, for an allocator's events, the address.
    # bytes: allocated bytes that the event moves; of a free or retag, those of its storage.
    "events": pa.schema(
        [
            ("time_us", pa.int64()),  # since the run's epoch
            ("id", pa.int64()),
            ("bytes", pa.int64()),
            ("context", pa.int32()),
        ]
    ),
    # component: what the bytes join (alloc, retag) or leave (free).
    # previous: of a retag, the component that they leave; otherwise null.
    "contexts": pa.schema(
        [
            ("action", pa.int8()),
            ("device", pa.string()),
            ("stream", pa.int64()),
            ("component", pa.string()),
            ("previous", pa.string()),
            ("scope", pa.int32()),
            ("stack", pa.int32()),  # -1: not recorded
        ]
    ),
    # Row 0 is the process itself (parent -1).
    # kind: process, request, phase, layer, chunk, module, op
    "scopes": pa.schema([("parent", pa.int32()), ("kind", pa.string()), ("name", pa.string())]),
    # Innermost frame first, each "file:line:function".
    "stacks": pa.schema([("frames", pa.list_(pa.string()))]),
    # source: rss, hwm (its high-water mark), nvml, allocated, reserved, …
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
}
