"""Which schedule, selector and cache go together, and why others don't."""

import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tidekv import options
from tidekv.caches import CompactCache, QuantisedCache, QuantisedRaggedCache, RaggedCache
from tidekv.errors import InfeasibleError, check_choice
from tidekv.schedules import SCHEDULES, Schedule
from tidekv.selectors import SELECTORS, Selector

#: How kept rows are held.
CACHES: Mapping[str, type[CompactCache]] = {
    "full_precision": CompactCache,
    "kivi": QuantisedCache,
}

#: What takes a cache's place where the heads of a layer keep unequal numbers of rows.
_RAGGED: Mapping[Any, type[CompactCache]] = {
    CompactCache: RaggedCache,
    QuantisedCache: QuantisedRaggedCache,
}


def cache_of(
    schedule: Schedule, selector: Selector | None, cache: str | Callable[[int], CompactCache]
) -> Callable[[int], CompactCache]:
    """What holds the rows that are kept, made for a number of layers.

    Args:
        cache: a name in :data:`CACHES`, or what makes one, such as
            ``functools.partial(QuantisedCache, bits=4)``.

    Raises:
        InfeasibleError: they don't go together, or there is no such cache.
    """
    if isinstance(cache, str):
        check_choice("cache", cache, CACHES)
        cache = CACHES[cache]
    if not callable(cache):
        raise InfeasibleError(
            f"A cache is given by name or as what makes one for a number of layers, such as the "
            f"class CompactCache, not as {cache!r}."
        )
    reason = obstacle(type(schedule), selector)
    if reason is not None:
        raise InfeasibleError(reason)
    made, parameters = (cache.func, cache.keywords) if isinstance(cache, partial) else (cache, {})
    if selector is None and made is CompactCache and schedule.cache_class is not None:
        return schedule.cache_class
    if selector is not None and selector.head_budgets and made in _RAGGED:
        return partial(_RAGGED[made], **parameters)
    return cache


def obstacle(schedule: type[Schedule], selector: Selector | type[Selector] | None) -> str | None:
    """Why they don't go together, in one sentence; None: they do."""
    name = name_of(SCHEDULES, schedule)
    if selector is None:
        if not schedule.keeps_all:
            return f"The schedule {name} is about evicting; name a selector, or another schedule."
        return None
    chosen = name_of(SELECTORS, selector if isinstance(selector, type) else type(selector))
    if not schedule.whole_layers:
        if selector.every_query:
            return (
                f"The selector {chosen} needs every query of the prompt, and under {name} rows are "
                "gone before later queries come; use another schedule."
            )
        if selector.every_input:
            return (
                f"The selector {chosen} needs what attention was given for every row of the "
                f"prompt, and under {name} rows are gone; use another schedule."
            )
        if selector.head_budgets:
            return (
                f"The selector {chosen} keeps unequal numbers of rows in the heads of a layer, and "
                f"under {name} later chunks attend to them; use another schedule."
            )
        if selector.across_layers:
            return (
                f"The selector {chosen} decides across layers once each has seen the whole prompt; "
                f"use another schedule than {name}."
            )
    return None


def table() -> dict[str, dict[str, str | None]]:
    """By selector and schedule or cache, why they don't go together (None: they do)."""
    found: dict[str, dict[str, str | None]] = {}
    for name, selector in SELECTORS.items():
        row = {other: obstacle(schedule, selector) for other, schedule in SCHEDULES.items()}
        found[name] = row | {"kivi": None}  # holds what any selector keeps
    return found


def as_json() -> dict[str, Any]:
    """Everything there is, with its parameters, and the table."""
    return {
        **{
            what: {
                name: {"summary": _summary(made), "parameters": options.defaults(takes)}
                for name, (made, takes) in entries.items()
            }
            for what, entries in _entries().items()
        },
        "why_not": table(),
    }


def as_text() -> str:
    """The same for people, within 80 columns."""
    reasons: list[str] = []

    def mark(reason: str | None) -> str:
        if reason is None:
            return "yes"
        if reason not in reasons:
            reasons.append(reason)
        return f"({reasons.index(reason) + 1})"

    rows = table()
    columns = next(iter(rows.values())).keys()
    short = {name: name.replace("_", " ").split() for name in columns}
    lines = [
        " " * 13 + "".join(f"{''.join(words[part : part + 1]):<9}" for words in short.values())
        for part in range(max(map(len, short.values())))
    ]
    for selector, row in rows.items():
        lines.append(f"{selector:<13}" + "".join(f"{mark(row[name]):<9}" for name in columns))
    lines.append("")
    for number, reason in enumerate(reasons, 1):
        lines += textwrap.wrap(f"({number}) {reason}", 80, subsequent_indent="    ")
    for what, entries in _entries().items():
        lines += ["", f"{what}:"]
        for name, (made, takes) in entries.items():
            lines += textwrap.wrap(
                f"{name}: {_summary(made)}", 78, initial_indent="  ", subsequent_indent="    "
            )
            given = ", ".join(f"{one}={value}" for one, value in options.defaults(takes).items())
            if given:
                lines += textwrap.wrap(
                    given, 76, initial_indent="      ", subsequent_indent="      "
                )
    return "\n".join(line.rstrip() for line in lines)


def _entries() -> dict[str, dict[str, tuple[type, type]]]:
    """What there is by kind and name: a class, and the one whose parameters are the user's."""
    return {
        "schedules": {name: (made, made) for name, made in SCHEDULES.items()},
        "selectors": {name: (made, made) for name, made in SELECTORS.items()},
        "caches": {name: (made, made.layer_class) for name, made in CACHES.items()},
    }


def _summary(made: type) -> str:
    """The first sentence or so of its docstring."""
    return " ".join((made.__doc__ or "").partition("\n\n")[0].replace("``", "").split())


def name_of(registry: Mapping[str, type[Any]], wanted: type) -> str:
    """What a registry calls a class; its own name if it isn't there."""
    return next((name for name, one in registry.items() if one is wanted), wanted.__name__)
