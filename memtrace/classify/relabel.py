"""Other components for the events of one process, everything else as it was.

An allocation or retag that a rule matches gives its bytes the rule's component; any other gives
them what it gave before. So a storage keeps its retags, unless a rule matches them. Whatever takes
bytes away, a free or a retag, takes them from where they are by then.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memtrace.classify.evidence import GIVES, meets, open_to_rules
from memtrace.classify.rules import UserRule
from memtrace.trace.reader import Columns, ProcessTrace
from memtrace.trace.schema import TABLES, TENSOR_ACTIONS, Action

_MOVES = (*TENSOR_ACTIONS, Action.FREE_COMPLETED)


@dataclass(frozen=True)
class Relabelled:
    """New ``events`` and ``contexts``, and what each rule matched in them."""

    events: Columns
    contexts: Columns
    matched: tuple[int, ...]  # allocations and retags, one a rule
    bytes: tuple[int, ...]  # of the allocations among them


def relabel(process: ProcessTrace, rules: Sequence[UserRule]) -> Relabelled:
    """Apply the rules to one process.

    Raises:
        TraceError: the trace is damaged.
    """
    contexts, context = process.contexts, process.events["context"]
    labels = _Labels(contexts, rules)
    action = contexts["action"][context]
    rule = _first_match(process, rules)
    given = np.where(rule >= 0, labels.rules[rule], labels.component[context])

    order, first = _by_storage(process)
    now = _label_since(np.isin(action, GIVES)[order], given[order], first)
    was = np.concatenate(([-1], now[:-1]))
    was[first == np.arange(len(order))] = -1  # the first event of its storage

    component, previous = labels.component[context].copy(), labels.previous[context].copy()
    component[order] = np.where(now >= 0, now, component[order])
    retag = (action == Action.RETAG)[order] & (was >= 0)
    previous[order[retag]] = was[retag]
    events = {**process.events}
    new_contexts, events["context"] = _contexts(contexts, context, component, previous, labels)
    sizes = np.where(action == Action.ALLOC, process.events["bytes"], 0)
    return Relabelled(
        events=events,
        contexts=new_contexts,
        matched=tuple(int((rule == number).sum()) for number in range(len(rules))),
        bytes=tuple(int(sizes[rule == number].sum()) for number in range(len(rules))),
    )


class _Labels:
    """A number for each component, -1 for none."""

    def __init__(self, contexts: Columns, rules: Sequence[UserRule]) -> None:
        ruled = [rule.component for rule in rules]
        self.names = list(dict.fromkeys((*contexts["component"], *contexts["previous"], *ruled)))
        numbers = {name: number for number, name in enumerate(self.names) if name is not None}
        #: Of each context, and of each rule; a last one for no rule.
        self.component, self.previous, self.rules = (
            np.array([numbers.get(name, -1) for name in names], dtype=np.int64)
            for names in (contexts["component"], contexts["previous"], (*ruled, None))
        )


def _first_match(process: ProcessTrace, rules: Sequence[UserRule]) -> np.ndarray:
    """The first rule that matches each event, counted from 0; -1: none."""
    context, size = process.events["context"], process.events["bytes"]
    allowed = open_to_rules(process)
    found = np.full(len(context), -1, dtype=np.int64)
    for number, rule in reversed(list(enumerate(rules))):
        matches = (allowed & meets(process, rule))[context]
        if rule.min is not None:
            matches &= size >= rule.min
        if rule.max is not None:
            matches &= size <= rule.max
        found[matches] = number
    return found


def _by_storage(process: ProcessTrace) -> tuple[np.ndarray, np.ndarray]:
    """Events that move bytes, grouped by device and storage and in order within each.

    Returns:
        Their rows, and for each the position of its group's first.
    """
    contexts, context = process.contexts, process.events["context"]
    numbers: dict[str | None, int] = {}
    device = np.array(
        [numbers.setdefault(name, len(numbers)) for name in contexts["device"]], dtype=np.int64
    )
    rows = np.flatnonzero(np.isin(contexts["action"], _MOVES)[context])
    identity, place = process.events["id"][rows], device[context[rows]]
    order = np.lexsort((rows, identity, place))
    identity, place = identity[order], place[order]
    starts = np.ones(len(rows), dtype=bool)
    starts[1:] = (identity[1:] != identity[:-1]) | (place[1:] != place[:-1])
    first = np.maximum.accumulate(np.where(starts, np.arange(len(rows)), 0))
    return rows[order], first


def _label_since(gives: np.ndarray, given: np.ndarray, first: np.ndarray) -> np.ndarray:
    """The label that the last event of the storage that gave one gave; -1 before any did."""
    last = np.maximum.accumulate(np.where(gives, np.arange(len(gives)), -1))
    return np.where(last >= first, given[last], -1) if len(gives) else given


def _contexts(
    contexts: Columns,
    context: np.ndarray,
    component: np.ndarray,
    previous: np.ndarray,
    labels: _Labels,
) -> tuple[Columns, np.ndarray]:
    """The contexts with those added that new components need, and the context of each event."""
    wanted = np.stack([context, component, previous], axis=1)
    kinds, kind = np.unique(wanted, axis=0, return_inverse=True)
    columns: Mapping[str, list] = {name: list(contexts[name]) for name in TABLES["contexts"].names}
    numbers = np.empty(len(kinds), dtype=np.int64)
    for row, (old, joins, leaves) in enumerate(kinds.tolist()):
        numbers[row] = old
        if joins != labels.component[old] or leaves != labels.previous[old]:
            numbers[row] = len(columns["action"])
            changed = {
                "component": labels.names[joins] if joins >= 0 else None,
                "previous": labels.names[leaves] if leaves >= 0 else None,
            }
            for name, column in columns.items():
                column.append(changed.get(name, contexts[name][old]))
    return dict(columns), numbers[kind.ravel()]
