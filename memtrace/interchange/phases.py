"""Annotations of a snapshot as phases: which ``record_function`` an entry happened in.

A heuristic, *by time*: entries and annotations have one clock, in microseconds, and nothing else in
common. It is wrong for an entry in the same microsecond as a border, and for one that another
thread made meanwhile. Annotations that cross each other, as those of two threads do, are no phases
of anything: of two that cross, the later one is left out.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from memtrace.interchange.snapshot import Annotation

#: Start, end, name.
Interval = tuple[int, int, str]


def intervals(annotations: Iterable[Annotation]) -> tuple[list[Interval], int]:
    """Intervals that nest, outer ones first, and how many annotations make none of these.

    An END belongs to the last START of its name that has none yet.
    """
    open_: dict[str, list[int]] = {}
    found: list[Interval] = []
    lost = 0
    for border in sorted(annotations, key=lambda border: border.time_us):
        if border.begins:
            open_.setdefault(border.name, []).append(border.time_us)
        elif open_.get(border.name):
            found.append((open_[border.name].pop(), border.time_us, border.name))
        else:
            lost += 1
    lost += sum(map(len, open_.values()))
    found.sort(key=lambda one: (one[0], -one[1]))
    nested: list[Interval] = []
    around: list[int] = []  # ends of those that are open
    for one in found:
        while around and around[-1] <= one[0]:
            around.pop()
        if around and one[1] > around[-1]:
            lost += 1
            continue
        nested.append(one)
        around.append(one[1])
    return nested, lost


def scopes_at(
    nested: Sequence[Interval], times: np.ndarray, scope: Callable[[int, str], int]
) -> np.ndarray:
    """The number of the innermost phase at each of ``times``; 0 outside all of them.

    Args:
        nested: as :func:`intervals` returns them.
        times: microseconds, in any order.
        scope: the number of a phase in another, 0 being the outermost.
    """
    borders: list[int] = []
    inside: list[int] = []  # the phase from a border on
    around: list[tuple[int, int]] = []  # end and number of those that are open

    def close(until: int | None) -> None:
        while around and (until is None or around[-1][0] <= until):
            end, _ = around.pop()
            borders.append(end)
            inside.append(around[-1][1] if around else 0)

    for start, end, name in nested:
        close(start)
        number = scope(around[-1][1] if around else 0, name)
        around.append((end, number))
        borders.append(start)
        inside.append(number)
    close(None)
    place = np.searchsorted(np.array(borders, dtype=np.int64), times, side="right")
    return np.array([0, *inside], dtype=np.int64)[place]
