"""Which contexts of a process meet a rule's conditions, from what the trace itself says."""

from collections.abc import Callable
from functools import cache

import numpy as np

from memtrace.classify.rules import SCOPES, UserRule, any_match
from memtrace.components import base
from memtrace.trace.reader import ProcessTrace
from memtrace.trace.schema import Action

#: The actions that give bytes a component.
GIVES = (Action.ALLOC, Action.RETAG)


def open_to_rules(process: ProcessTrace) -> np.ndarray:
    """Contexts that a rule may change: bool, one a context.

    Not those whose component the user's code chose itself.
    """
    contexts = process.contexts
    chosen = _around(process, "component", lambda _: True)
    return np.asarray(np.isin(contexts["action"], GIVES) & ~chosen[contexts["scope"]])


def meets(process: ProcessTrace, rule: UserRule) -> np.ndarray:
    """Contexts that meet every condition but those on the size: bool, one a context."""
    contexts = process.contexts
    found = np.ones(len(contexts["action"]), dtype=bool)
    for key, globs in rule.globs.items():
        matches = cache(lambda text, globs=globs: any_match(globs, text))
        if key in SCOPES:
            found &= _around(process, key, matches)[contexts["scope"]]
        elif key == "stack":
            found &= _stacks(process, matches)[contexts["stack"]]
        else:
            found &= np.array([_has(label, matches) for label in contexts["component"]], dtype=bool)
    return found


def _around(process: ProcessTrace, kind: str, matches: Callable[[str], bool]) -> np.ndarray:
    """Scopes that are a matching one of this kind or lie in one: bool, one a scope."""
    scopes = process.scopes
    found = np.zeros(len(scopes["parent"]), dtype=bool)
    rows = zip(scopes["parent"], scopes["kind"], scopes["name"], strict=True)
    for row, (parent, its_kind, name) in enumerate(rows):
        found[row] = (its_kind == kind and matches(name)) or (parent >= 0 and found[parent])
    return found


def _stacks(process: ProcessTrace, matches: Callable[[str], bool]) -> np.ndarray:
    """Stacks with a matching frame: bool, one a stack, and a last one for "not recorded"."""
    stacks = process.stacks["frames"]
    return np.array(
        [*(any(matches(frame) for frame in frames or ()) for frames in stacks), False], dtype=bool
    )


def _has(component: str | None, matches: Callable[[str], bool]) -> bool:
    """``Act`` matches ``Act/detail`` too."""
    return component is not None and (matches(component) or matches(base(component)))
