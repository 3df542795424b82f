"""The allocator of :mod:`memtrace.allocator.native` for long streams.

Its logs are equal to the readable definition's, bit for bit; tests hold the two together. It needs
numba, which is optional (``pip install 'tidekv[fast]'``).
"""

from collections.abc import Sequence

import numpy as np

from memtrace.allocator import kernel
from memtrace.allocator.caching import CachingRules, Completion
from memtrace.allocator.device import FIRST_ADDRESS, FIRST_RESERVED, Device
from memtrace.allocator.log import COLUMNS, Log
from memtrace.allocator.ops import Op, Ops
from memtrace.allocator.settings import NEWEST, Settings, Version

_LOG_ROWS = 1 << 18


class CompiledAllocator:
    """:class:`~memtrace.allocator.native.NativeAllocator` for streams of operations.

    ``streams``: the handles of all streams that operations name; ``pools``: the highest number of
    a private pool.

    Raises:
        ValueError: private pools of expandable segments, which PyTorch may drop while blocks live,
            are left to the readable definition.
    """

    def __init__(
        self,
        device: Device,
        settings: Settings | None = None,
        torch: Version = NEWEST,
        *,
        fraction: float | None = None,
        completion: Completion = "soon",
        streams: Sequence[int] = (0,),
        pools: int = 0,
    ) -> None:
        settings = settings or Settings()
        if pools and settings.expandable:
            raise ValueError("no private pools of expandable segments are followed here")
        # The limits are worked out once, by the readable definition.
        plain = CachingRules(device, settings, torch, fraction=fraction)
        allowed = min(plain.allowed, kernel.UNLIMITED)
        now = np.zeros(15, dtype=np.int64)
        now[[kernel.SPARE, kernel.FIRST_LATER, kernel.LAST_LATER, kernel.UNKNOWN]] = -1
        now[kernel.FREE_BYTES] = device.free_bytes
        now[kernel.NEXT_ADDRESS], now[kernel.NEXT_RESERVED] = FIRST_ADDRESS, FIRST_RESERVED
        rules = np.zeros(15, dtype=np.int64)
        for rule, value in {
            kernel.MAX_SPLIT: min(settings.max_split_size, kernel.UNLIMITED),
            kernel.MAX_ROUNDING: min(settings.max_non_split_rounding, kernel.UNLIMITED),
            kernel.LARGE_SEGMENT: settings.large_segment,
            kernel.EXPANDABLE: settings.expandable,
            kernel.ALLOWED: allowed,
            kernel.RESERVATION: settings.reservation(device.total),
            kernel.COLLECTS: plain.collects,
            kernel.GC_LIMIT: int(settings.gc_threshold * allowed) if plain.collects else 0,
            kernel.THROWS: settings.throw_on_oom,
            kernel.REJECTED: int(settings.fraction * device.total),
            kernel.BY_BLOCK: torch == (2, 12),
            kernel.BY_SEGMENT: torch >= (2, 13),
            kernel.SCOPES_CLOSE: torch <= (2, 12),
            kernel.OUTERMOST: torch < (2, 10),
            kernel.SOON: completion == "soon",
        }.items():
            rules[rule] = value
        handles = np.array(sorted({0, *streams}), dtype=np.int64)
        sets = 2 * (pools + 1) * len(handles)
        self._state = kernel.State(
            blocks=np.empty((0, kernel.FIELDS), dtype=np.int64),
            free=np.empty((sets, 0), dtype=np.int32),
            free_count=np.zeros(sets, dtype=np.int64),
            unmapped=np.empty((sets, 0), dtype=np.int32),
            unmapped_count=np.zeros(sets, dtype=np.int64),
            pools=np.zeros((2 * (pools + 1), 3), dtype=np.int64),
            now=now,
            rules=rules,
            divisions=np.array(settings.divisions, dtype=np.int64),
            streams=handles,
            log=np.empty((0, len(COLUMNS)), dtype=np.int64),
            named=np.empty(0, dtype=np.int32),
            waiting=np.empty((0, 2), dtype=np.int64),
            scopes=np.empty(0, dtype=np.int64),
            freeable=np.zeros(pools + 1, dtype=np.int64),
            scratch=np.empty(0, dtype=np.int64),
        )

    def run(self, ops: Ops) -> Log:
        """Do a stream of operations; what failed is in the log too.

        Raises:
            KeyError: a block is used that isn't allocated.
            ValueError: streams are recorded beside private pools of torch up to 2.12, whose frees
                are deferred: the readable definition can do that.
        """
        state = self._state
        deferring = state.rules[kernel.SCOPES_CLOSE] and len(state.pools) > 2
        if deferring and (ops.kind == Op.RECORD_STREAM).any():
            raise ValueError("no frees are deferred here")
        named = self._state.named
        most = int(ops.block.max(initial=-1)) + 1
        if most > len(named):
            self._state = self._state._replace(named=_longer(named, 2 * most, -1))
        streams = np.searchsorted(self._state.streams, ops.stream)
        columns = (ops.kind, ops.block, ops.size, streams, ops.pool)
        arrays = [np.asarray(column, dtype=np.int64) for column in columns]
        logs = []
        done = 0
        while done < len(ops):
            self._make_room()
            done = kernel.run(self._state, *arrays, done)
            now = self._state.now
            if now[kernel.UNKNOWN] >= 0:
                raise KeyError(int(now[kernel.UNKNOWN]))
            logs.append(self._state.log[: now[kernel.LOGGED]].copy())
            now[kernel.LOGGED] = 0
        return Log(np.concatenate(logs)) if logs else Log.of([])

    def largest_free(self) -> int:
        """Bytes of the largest free block outside private pools."""
        state = self._state
        sets = 2 * len(state.streams)
        last = [
            state.free[row, count - 1] for row, count in enumerate(state.free_count[:sets]) if count
        ]
        return int(state.blocks[last, kernel.SIZE].max(initial=0)) if last else 0

    def _make_room(self) -> None:
        """Room for every operation that the next ones could be."""
        state = self._state
        most = 8 * (int(state.now[kernel.USED]) + 64)
        self._state = state._replace(
            blocks=_longer(state.blocks, most),
            free=_wider(state.free, most),
            unmapped=_wider(state.unmapped, most),
            log=_longer(state.log, max(_LOG_ROWS, 2 * most)),
            waiting=_longer(
                state.waiting, 4 * (int(state.now[kernel.WAITING]) + kernel.MOST_STREAMS)
            ),
            scopes=_longer(state.scopes, 2 * int(state.now[kernel.SCOPES]) + 8),
            scratch=_longer(state.scratch, most),
        )


def _longer(array: np.ndarray, length: int, fill: int = 0) -> np.ndarray:
    if len(array) >= length:
        return array
    found = np.full((length, *array.shape[1:]), fill, dtype=array.dtype)
    found[: len(array)] = array
    return found


def _wider(array: np.ndarray, width: int) -> np.ndarray:
    if array.shape[1] >= width:
        return array
    found = np.zeros((len(array), width), dtype=array.dtype)
    found[:, : array.shape[1]] = array
    return found
