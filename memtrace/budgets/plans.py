"""What each collected test is to keep to, parsed before anything runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest

from memtrace.budgets.words import Budget, Limit, Plateau, parse_budget, parse_plateau
from memtrace.errors import MemtraceError

BUDGET, PLATEAU = "memory_budget", "memory_plateau"


@dataclass(frozen=True)
class Plan:
    """What one test is to keep to."""

    limits: tuple[Limit, ...] = ()
    names: tuple[str, ...] = ()  # of baselines that it measures
    warmup: int = 0
    scope: str = "test"  # of what is kept of it
    plateau: Plateau | None = None
    card: str | None = None  # that isn't there, to run it on
    allocator: str = ""  # PYTORCH_CUDA_ALLOC_CONF on that card
    error: str | None = None  # what is wrong with a marker: the test's own error

    @property
    def needs(self) -> set[str]:
        """The baselines that its limits are relative to."""
        return {one.size.of for one in self.limits if one.size.of and not one.saved}


PLAN = pytest.StashKey[Plan]()


def plan(item: pytest.Item, default: Budget | None, regressions: Sequence[Limit]) -> Plan | None:
    """What the test is to keep to; None: nothing, so that it isn't measured.

    A nearer marker (on the function, then the class, then the module, then the suite's default)
    replaces limits on the same metric and phase further out; beside each other all count.
    """
    try:
        budgets = [*_budgets(item), *([[default]] if default else [])]
        plateau = item.get_closest_marker(PLATEAU)
        if not budgets and not regressions and plateau is None:
            return None
        if plateau is not None and plateau.args:
            raise MemtraceError("memory_plateau takes names: memory_plateau(requests=40, slope=…)")
        every = [one for level in budgets for one in level]
        on_card = next((one for one in every if one.device is not None), Budget())
        return Plan(
            limits=(*_nearest(budgets), *regressions),
            names=tuple(one.name for one in every if one.name is not None),
            warmup=max((one.warmup for one in every), default=0),
            scope=every[0].scope if every else "test",
            plateau=None if plateau is None else parse_plateau(plateau.kwargs),
            card=on_card.device,
            allocator=on_card.allocator,
        )
    except MemtraceError as error:
        return Plan(error=str(error))


def _budgets(item: pytest.Item) -> list[list[Budget]]:
    """Those of the markers, the nearest node's first."""
    levels: dict[str, list[Budget]] = {}
    for node, marker in item.iter_markers_with_node(BUDGET):
        if marker.args:
            raise MemtraceError('memory_budget takes names: memory_budget(peak="300 MiB")')
        levels.setdefault(node.nodeid, []).append(parse_budget(marker.kwargs))
    return list(levels.values())


def _nearest(levels: Iterable[Sequence[Budget]]) -> list[Limit]:
    found: list[Limit] = []
    settled: set[tuple[str, str | None]] = set()  # metric and phase
    lifted: set[str] = set()
    for level in levels:
        new = [
            limit
            for budget in level
            for limit in budget.limits
            if (limit.metric, limit.phase) not in settled and limit.metric not in lifted
        ]
        found += new
        settled |= {(limit.metric, limit.phase) for limit in new}
        lifted |= {metric for budget in level for metric in budget.lifted}
    return found


def baselines_first(items: list[pytest.Item]) -> set[str]:
    """Move tests that measure a baseline before the first one that needs it; the rest stays.

    Returns:
        The names of all baselines that are measured.
    """
    for name in sorted({name for item in items for name in _plan(item).needs}):
        first = next(n for n, item in enumerate(items) if name in _plan(item).needs)
        late = [item for item in items[first:] if name in _plan(item).names]
        rest = [item for item in items[first:] if item not in late]
        items[first:] = late + rest
    return {name for item in items for name in _plan(item).names}


def _plan(item: pytest.Item) -> Plan:
    return item.stash.get(PLAN, Plan())


def parameters(item: pytest.Item) -> str:
    """The id of a test's parameters; empty: it has none."""
    callspec = getattr(item, "callspec", None)
    return "" if callspec is None else str(callspec.id)
