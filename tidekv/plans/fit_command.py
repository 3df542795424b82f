"""What ``tidekv plan --fit`` prints."""

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from tidekv.arguments import flag_of

if TYPE_CHECKING:
    from rich.table import Table

    from tidekv.plans.fitting import Changes, Fit


def fitted(arguments: argparse.Namespace, schema: int) -> bool:
    """Search for changes; whether there are some, or none are needed.

    Args:
        schema: of ``plan --json``.
    """
    from memtrace.render import show
    from tidekv.plans import cards, searches

    found, needed = searches.fit(arguments)
    card = cards.card_of(arguments.device)
    if arguments.json:
        lacks = None if needed is None else max(needed - found.room, 0)
        body = {"schema": schema, "card": card.key, "prompt_tokens": arguments.prompt}
        print(json.dumps({**body, **asdict(found), "lacks": lacks}, indent=2))
    else:
        show(tried(found))
        print(proposal(found, needed, arguments.prompt, card.name))
    return found.proposal is not None


def tried(found: "Fit") -> "Table":
    """A line for each set of changes that was tried."""
    from memtrace.render import grid, size

    table = grid("changed", "reserved", "left", "over the bus", "fits", text=(0, 4))
    for one in found.tries:
        cells = ["-"] * 3
        if one.reserved_peak is not None:
            cells[0] = size(one.reserved_peak)
            if one.fits:
                cells[1] = size(found.room - one.reserved_peak)
                cells[2] = size(one.to_device + one.to_host)
        word = "yes" if one.fits else "no, by formula" if one.by_formula else "no"
        table.add_row(_flags(one.changes) or "nothing", *cells, word)
    return table


def _flags(changes: "Changes") -> str:
    """As the command line has them."""
    return " ".join(
        flag_of(name) + ("" if value is True else f" {value}") for name, value in changes.items()
    )


def proposal(found: "Fit", needed: int | None, prompt: int, card: str) -> str:
    """One sentence."""
    from memtrace.render import size

    if found.proposal is not None:
        if not found.proposal:
            return f"{prompt:,} tokens fit {card} as they are."
        return f"{prompt:,} tokens fit {card} with {_flags(found.proposal)}."
    if needed is None:
        return f"{prompt:,} tokens fit {card} in no way, and no larger card of the catalogue."
    if needed > found.room:
        return (
            f"{prompt:,} tokens fit {card} in no way: with all changes {size(needed)} are "
            f"allocated at the peak, {size(needed - found.room)} more than there are."
        )
    return (
        f"{prompt:,} tokens fit {card} in no way: with all changes {size(needed)} are allocated at "
        "the peak, which there are, but in pieces; try --allocator expandable_segments:True."
    )
