"""Where an account peaked, what it held there, and what it held beyond its steady state."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from memtrace.analysis.accounts import Account
from memtrace.analysis.places import OUTSIDE, SEPARATOR, Place, inside, place
from memtrace.analysis.process import ProcessMemory
from memtrace.components import external, live


@dataclass(frozen=True)
class Balance:
    """Both equations at one event, in bytes; None: unknown."""

    event: int
    time_us: int
    allocated: int
    live: int
    components: Mapping[str, int]
    details: Mapping[str, int]
    allocator: int | None
    external: int | None
    process: int | None
    #: Time of the sample that ``process`` was read from: the nearest one.
    process_time_us: int | None


@dataclass(frozen=True)
class Group:
    """Live storages of one component that the same operator made in the same kind of place."""

    component: str
    place: Place  # folded: of any request, layer and chunk
    layers: tuple[int, ...]
    stack: tuple[str, ...]  # innermost frame first; empty: not recorded
    count: int
    bytes: int

    @property
    def where(self) -> str:
        """Where they were made, in one line."""
        outer = [part for part in (self.place.phase, _range(self.layers)) if part]
        inner = [part for part in (self.place.module, self.place.op) if part]
        return SEPARATOR.join(outer + inner) or OUTSIDE


def _range(layers: tuple[int, ...]) -> str:
    if len(layers) < 2:
        return f"layer {layers[0]}" if layers else ""
    first, last = layers[0], layers[-1]
    if len(layers) == 1 + last - first:
        return f"layers {first}-{last}"
    return f"{len(layers)} layers of {first}-{last}"


def balance(account: Account, memory: ProcessMemory, event: int) -> Balance:
    """What the account and its process held after ``event``.

    Process memory is that of the nearest sample, so ``external`` there is as exact as sampling is.
    """
    reserved = None if account.reserved is None else account.reserved.read_one(event)
    allocated = account.allocated.read_one(event)
    time_us = int(account.time_us[event])
    sample = memory.nearest(time_us)
    process = None if sample is None else int(memory.value[sample])
    rest = None if reserved is None or process is None else external(process, reserved)
    components = {name: one.read_one(event) for name, one in account.components.items()}
    return Balance(
        event=event,
        time_us=time_us,
        allocated=allocated,
        live=live(components),
        components=components,
        details={name: one.read_one(event) for name, one in account.details.items()},
        allocator=None if reserved is None else reserved - allocated,
        external=rest,
        process=process,
        process_time_us=None if sample is None else int(memory.time_us[sample]),
    )


def top_allocations(account: Account, event: int, born: np.ndarray | None = None) -> list[Group]:
    """What was live after ``event``, grouped by what made it, the largest group first.

    ``born``: by event, whether what it allocated counts (bool); None: all does.
    """
    events, contexts = account.process.events, account.process.contexts
    lives = account.lives
    live = lives.allocated(event)
    if born is not None:
        live = live[born[lives.born[live]]]
    # The last event of a storage says where it belongs, its allocation where it was made.
    births, labels = lives.born[live], lives.labels_at(event)[live]
    many = len(contexts["action"])
    pairs = events["context"][labels].astype(np.int64) * many + events["context"][births]
    kinds, kind = np.unique(pairs, return_inverse=True)
    counts = np.bincount(kind, minlength=len(kinds))
    sizes = np.zeros(len(kinds), dtype=np.int64)
    np.add.at(sizes, kind, events["bytes"][births])

    groups: dict[tuple[str, Place, tuple[str, ...]], list[tuple[int | None, int, int]]] = {}
    for now, birth, count, size in zip(*divmod(kinds, many), counts, sizes, strict=True):
        where = place(account.process, int(contexts["scope"][birth]))
        stack = int(contexts["stack"][birth])
        frames = account.process.frames(stack)
        key = (contexts["component"][now], where.folded(), frames)
        groups.setdefault(key, []).append((where.layer, int(count), int(size)))
    found = [
        Group(
            component=component,
            place=folded,
            layers=tuple(sorted({layer for layer, _, _ in parts if layer is not None})),
            stack=frames,
            count=sum(count for _, count, _ in parts),
            bytes=sum(size for _, _, size in parts),
        )
        for (component, folded, frames), parts in groups.items()
    ]
    return sorted(found, key=lambda group: (-group.bytes, str(group)))


def above_steady(account: Account) -> int:
    """The construction peak above the steady state, in bytes.

    That is the maximum of (allocated - model) while the cache is built, less the KV that stays:
    ``KV_res`` without ``KV_res/full`` (the buffers of the layer that is being computed) at the end
    of the construction. It lasts from the first to the last allocation or retag in a phase named
    "prefill", so loading the model doesn't count; without such a phase it is the whole trace.
    """
    events, contexts = account.process.events, account.process.contexts
    prefill = inside(account.process, "phase", "prefill")[contexts["scope"]]
    during = np.flatnonzero(prefill[events["context"]])
    first, last = (during[0], during[-1]) if len(during) else (0, len(events["context"]) - 1)
    full = account.details.get("KV_res/full")
    kept = account.components["KV_res"].read_one(last) - (full.read_one(last) if full else 0)
    return account.beside_model.peak_between(first, last) - kept
