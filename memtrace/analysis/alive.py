"""What is alive at an instant, one by one, and what differs between two instants."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from memtrace.analysis.accounts import Account
from memtrace.analysis.peaks import Group
from memtrace.analysis.places import Place, place


@dataclass(frozen=True)
class Storage:
    """One live storage."""

    component: str
    bytes: int
    age_us: int  # since it was allocated
    place: Place  # of its allocation
    stack: tuple[str, ...]  # innermost frame first; empty: not recorded


def largest(account: Account, event: int, count: int) -> list[Storage]:
    """The ``count`` largest storages that are live after ``event``, of equal ones the oldest."""
    process = account.process
    events, contexts = process.events, process.contexts
    lives = account.lives
    live = lives.allocated(event)
    sizes = events["bytes"][lives.born[live]]
    top = live[np.argsort(-sizes, kind="stable")[:count]]
    found = []
    for born, label in zip(
        lives.born[top].tolist(), lives.labels_at(event)[top].tolist(), strict=True
    ):
        context = events["context"][born]
        stack = int(contexts["stack"][context])
        found.append(
            Storage(
                component=contexts["component"][events["context"][label]],
                bytes=int(events["bytes"][born]),
                age_us=int(account.time_us[event] - account.time_us[born]),
                place=place(process, int(contexts["scope"][context])),
                stack=process.frames(stack),
            )
        )
    return found


def change(now: Sequence[Group], before: Sequence[Group]) -> list[Group]:
    """What ``now`` has beyond ``before``, bytes and count negative where less; most bytes first.

    Groups of two accounts may be compared too: those of one component, place and stack are alike.
    """
    kinds = {(one.component, one.place, one.stack): one for one in now}
    for one in before:
        key = (one.component, one.place, one.stack)
        base = kinds.get(key, replace(one, count=0, bytes=0))
        layers = tuple(sorted({*base.layers, *one.layers}))
        left = replace(
            base, count=base.count - one.count, bytes=base.bytes - one.bytes, layers=layers
        )
        kinds[key] = left
    found = [one for one in kinds.values() if one.bytes or one.count]
    return sorted(found, key=lambda group: (-abs(group.bytes), str(group)))
