"""The steps of a run, one after another: phases, layers, chunks; and what two runs have in common.

A step of a kind lasts from the first event in the outermost scope of that kind until the next step
begins, or until something is allocated outside every such scope. Phases that are entered inside a
layer or a chunk are part of it: they alternate too often to be steps of the run.

Wrong where threads take turns within a step: each turn is a step then. Frees say nothing of where
the program is, so a step in which nothing is allocated isn't seen.
"""

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from memtrace.analysis.accounts import Account
from memtrace.trace.reader import Columns
from memtrace.trace.schema import Action

#: From the coarsest to the finest.
KINDS = ("phase", "layer", "chunk")
#: Scopes from the outermost, each as (kind, name).
Key = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Steps:
    """Steps of one kind in order of time; they don't overlap.

    ``keys``: of each, the scope and those around it. The times are in microseconds (int64).
    """

    kind: str
    keys: Sequence[Key]
    start_us: np.ndarray
    end_us: np.ndarray

    def names(self) -> list[str]:
        """Of each step: ``prefill``, ``layer 3``."""
        return [name if kind == "phase" else f"{kind} {name}" for *_, (kind, name) in self.keys]


def steps(account: Account, kind: str) -> Steps:
    """The steps of one of :data:`KINDS`."""
    process = account.process
    contexts, context = process.contexts, process.events["context"]
    allocates = account.here & np.isin(contexts["action"], (Action.ALLOC, Action.RETAG))
    keys, key_of = _keys(process.scopes, kind)
    # By event what it lies in: -1 outside of all, -2 where it doesn't say.
    of_context = np.where(allocates, key_of[contexts["scope"]], -2).astype(np.int32)
    label = of_context[context]
    said = np.flatnonzero(label != -2)
    label = label[said]
    begins = np.flatnonzero(np.append(True, label[1:] != label[:-1])[: len(label)])
    time_us = account.time_us[said[begins]]
    end_us = np.append(time_us[1:], account.time_us[-1:])[: len(time_us)]
    inside = label[begins] >= 0
    return Steps(
        kind,
        [keys[number] for number in label[begins][inside].tolist()],
        time_us[inside],
        end_us[inside],
    )


def _keys(scopes: Columns, kind: str) -> tuple[list[Key], np.ndarray]:
    """All keys, and of each scope the number of its own; -1: it is in no step of this kind."""
    paths: list[Key] = []
    numbers: dict[Key, int] = {}
    found = np.full(len(scopes["parent"]), -1, dtype=np.int32)
    rows = zip(np.asarray(scopes["parent"]).tolist(), scopes["kind"], scopes["name"], strict=True)
    for row, (parent, own, name) in enumerate(rows):
        path = _into(paths[parent] if parent >= 0 else (), own, name)
        paths.append(path)
        kinds = [one for one, _ in path]
        if kind in kinds:
            key = path[: kinds.index(kind) + 1]
            found[row] = numbers.setdefault(key, len(numbers))
    return list(numbers), found


def _into(path: Key, kind: str, name: str) -> Key:
    """The path into a scope: the last phase before any layer and chunk, then those, each once."""
    kinds = [one for one, _ in path]
    if kind == "phase" and kinds in ([], ["phase"]):
        return ((kind, name),)
    if kind in ("layer", "chunk") and kind not in kinds:
        return (*path, (kind, name))
    return path


def common(runs: Sequence[Steps]) -> list[np.ndarray]:
    """The steps that all runs take in the same order: of each run their numbers, ascending.

    A step is known by its key and by how often that came before: the second decoding of one run is
    the second of another. Of those that come in another order as few as possible are left out.
    """
    counted = [_counted(one.keys) for one in runs]
    first, *others = counted
    shared = [key for key in first if all(key in other for other in others)]
    for other in others:
        shared = [shared[number] for number in _ascending([other[key] for key in shared])]
    return [np.array([one[key] for key in shared], dtype=np.int64) for one in counted]


def _counted(keys: Sequence[Hashable]) -> dict[tuple[Hashable, int], int]:
    """The number of each (key, how often it came before)."""
    seen: dict[Hashable, int] = {}
    found = {}
    for number, key in enumerate(keys):
        found[(key, seen.get(key, 0))] = number
        seen[key] = seen.get(key, 0) + 1
    return found


def _ascending(numbers: Sequence[int]) -> list[int]:
    """Positions of a longest ascending part of ``numbers``, which differ from each other."""
    tails: list[int] = []  # of parts of each length, the position of the smallest last number
    values: list[int] = []
    before: list[int] = []
    for position, number in enumerate(numbers):
        length = bisect_left(values, number)
        before.append(tails[length - 1] if length else -1)
        tails[length : length + 1] = [position]
        values[length : length + 1] = [number]
    found = []
    position = tails[-1] if tails else -1
    while position >= 0:
        found.append(position)
        position = before[position]
    return found[::-1]
