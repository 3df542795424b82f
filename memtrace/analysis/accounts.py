"""The books of one device in one process: each component's bytes after each event.

An ``alloc`` adds bytes to a component, a ``free`` takes them from the one that the storage has by
then, a ``retag`` moves them from ``previous``. So a component is a masked running sum of the
events, and no join by storage is needed; :mod:`memtrace.analysis.identities` checks it with one.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memtrace.analysis.lifetimes import Lifetimes, lifetimes
from memtrace.components import LIVE_COMPONENTS, TENSOR_COMPONENTS, base
from memtrace.trace.reader import ProcessTrace
from memtrace.trace.schema import FREES, TENSOR_ACTIONS, Action


@dataclass(frozen=True)
class Series:
    """A step function of the events, in bytes.

    ``at``: the events at which it steps, ascending. ``levels``: one longer, ``levels[0]`` is 0 and
    ``levels[i + 1]`` holds from event ``at[i]`` on. Both int64.
    """

    at: np.ndarray
    levels: np.ndarray

    def read(self, events: np.ndarray) -> np.ndarray:
        """The bytes after each of ``events``."""
        return np.asarray(self.levels[np.searchsorted(self.at, events, side="right")])

    def read_one(self, event: int) -> int:
        """The bytes after one event."""
        return int(self.read(np.array([event]))[0])

    def peak_between(self, first: int, last: int) -> int:
        """The largest value after any of the events ``first`` to ``last``."""
        start, stop = np.searchsorted(self.at, [first, last], side="right")
        return int(self.levels[start : stop + 1].max())

    @cached_property
    def peak(self) -> int:
        """The largest value."""
        return int(self.levels.max())

    @cached_property
    def peak_event(self) -> int | None:
        """The first event at the peak; None when it is never above 0."""
        step = int(self.levels.argmax())
        return int(self.at[step - 1]) if step else None


@dataclass(frozen=True)
class Account:
    """The books of ``device`` in ``process``. Event numbers are rows of the process's events.

    A book takes 16 bytes an event: what a reader asks for once is made anew each time, not kept.
    """

    process: ProcessTrace
    device: str

    @cached_property
    def allocated(self) -> Series:
        """Allocated bytes, from ``alloc`` and ``free`` alone."""
        freed = self._where(Action.FREE) + self._where(Action.FREE_REQUESTED)
        return self._integrate(self._where(Action.ALLOC) - freed)

    @cached_property
    def components(self) -> Mapping[str, Series]:
        """Every tensor component, details summed up, in display order."""
        return {name: self._sum(self._labels_of(name)) for name in TENSOR_COMPONENTS}

    @cached_property
    def details(self) -> Mapping[str, Series]:
        """Every component that carries a detail, as ``KV_res/full``, sorted."""
        detailed = sorted(label for label in self._labels if "/" in label)
        return {name: self._sum([name]) for name in detailed}

    @property
    def live(self) -> Series:
        """The sum inside equation (1)."""
        return self._sum(self._labels_of(*LIVE_COMPONENTS))

    @property
    def beside_model(self) -> Series:
        """Allocated bytes without the model's."""
        return self._sum(self._labels_of(*(set(TENSOR_COMPONENTS) - {"model"})))

    @cached_property
    def rank(self) -> tuple[int, int]:
        """Sorts the largest peak first: of GPUs that hold anything, since their memory is scarce.

        Then the host's, and last meta tensors, which hold no memory.
        """
        peak = self.allocated.peak
        on_gpu = peak > 0 and self.device not in ("cpu", "meta")
        return (0 if on_gpu else 2 if self.device == "meta" else 1, -peak)

    @cached_property
    def reserved(self) -> Series | None:
        """What the device allocator holds; None: unknown. A CPU has no caching allocator."""
        if self.device == "cpu":
            return self.allocated
        taken = self._where(Action.SEGMENT_ALLOC) + self._where(Action.SEGMENT_MAP)
        returned = self._where(Action.SEGMENT_FREE) + self._where(Action.SEGMENT_UNMAP)
        segments = self._integrate(taken - returned)
        return segments if len(segments.at) else None

    @property
    def active(self) -> Series:
        """Allocated bytes, and those that were freed and wait for a stream."""
        signs = self._where(Action.ALLOC) - self._where(Action.FREE)
        return self._integrate(signs - self._where(Action.FREE_COMPLETED))

    @cached_property
    def allocator_peak(self) -> int | None:
        """The largest reserved - allocated after any event, in bytes; None: unknown."""
        if self.reserved is None:
            return None
        change = np.zeros(len(self.process.events["context"]), dtype=np.int64)
        change[self.reserved.at] += np.diff(self.reserved.levels)
        change[self.allocated.at] -= np.diff(self.allocated.levels)
        return int(np.cumsum(change).max(initial=0))

    @cached_property
    def time_us(self) -> np.ndarray:
        """Time of each event; that of another device counts as the event here before it.

        Threads may have written theirs a little out of order.
        """
        time_us = self.process.events["time_us"]
        here = self.here[self.process.events["context"]]
        if here.all() and (time_us[1:] >= time_us[:-1]).all():
            return np.asarray(time_us)
        first = time_us[here.argmax()]
        return np.maximum.accumulate(np.where(here, time_us, first))

    @cached_property
    def by_storage(self) -> np.ndarray:
        """Tensor events (int32), grouped by storage and in order within each group."""
        events = self.process.events
        moves = np.any([self._where(action) for action in TENSOR_ACTIONS], axis=0)
        tensor = np.flatnonzero(moves[events["context"]]).astype(np.int32)
        return np.asarray(tensor[np.argsort(events["id"][tensor], kind="stable")])

    @cached_property
    def lives(self) -> Lifetimes:
        """From when to when each allocation lived."""
        return lifetimes(self.process, self.here, self.by_storage)

    def event_at(self, time_us: np.ndarray) -> np.ndarray:
        """The last event at or before each time; -1 before the first."""
        return np.searchsorted(self.time_us, time_us, side="right") - 1

    @cached_property
    def here(self) -> np.ndarray:
        """Which contexts are of this device: bool, one a row."""
        return self.process.contexts_on(self.device)

    @cached_property
    def _labels(self) -> dict[str, int]:
        """A number for each component that a context of this process names."""
        contexts = self.process.contexts
        named = dict.fromkeys(contexts["component"]) | dict.fromkeys(contexts["previous"])
        return {label: number for number, label in enumerate(name for name in named if name)}

    def _labels_of(self, *components: str) -> list[str]:
        return [label for label in self._labels if base(label) in components]

    def _where(self, action: Action) -> np.ndarray:
        """1 for each context of this action on this device, else 0 (int8)."""
        return (self.here & (self.process.contexts["action"] == action)).astype(np.int8)

    @cached_property
    def moves(self) -> tuple[np.ndarray, np.ndarray]:
        """By context: the number of the label that bytes join, and of the one that they leave."""
        nothing = len(self._labels)
        contexts = self.process.contexts
        component, previous = (
            np.array([self._labels.get(name, nothing) for name in contexts[column]], dtype=np.int64)
            for column in ("component", "previous")
        )
        alloc, retag = (self._where(one).astype(bool) for one in (Action.ALLOC, Action.RETAG))
        free = np.any([self._where(action) for action in FREES], axis=0)
        joins = np.where(alloc | retag, component, nothing)
        leaves = np.where(free, component, np.where(retag, previous, nothing))
        return joins, leaves

    def _sum(self, labels: Collection[str]) -> Series:
        """The bytes of several components, details counted apart."""
        among = np.array([*(label in labels for label in self._labels), False], dtype=np.int8)
        joins, leaves = self.moves
        return self._integrate(among[joins] - among[leaves])

    def _integrate(self, signs: np.ndarray) -> Series:
        """The running sum of bytes, each event's signed as its context says."""
        events = self.process.events
        signed = signs[events["context"]]
        at = np.flatnonzero(signed)
        levels = np.zeros(len(at) + 1, dtype=np.int64)
        np.cumsum(events["bytes"][at] * signed[at], out=levels[1:])
        return Series(at, levels)


def accounts(process: ProcessTrace) -> list[Account]:
    """One account for each device that held a tensor or had no room for one.

    They come in order of their :attr:`Account.rank`.

    Raises:
        TraceError: the trace is damaged.
    """
    contexts = process.contexts
    holds = np.isin(contexts["action"], (*TENSOR_ACTIONS, Action.OOM))
    holds &= np.bincount(process.events["context"], minlength=len(holds)) > 0
    devices = {contexts["device"][context] for context in np.flatnonzero(holds)}
    found = [Account(process, device) for device in sorted(devices)]
    return sorted(found, key=lambda account: account.rank)
