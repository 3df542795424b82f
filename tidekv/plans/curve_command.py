"""``tidekv plan --prompts``: peaks against prompt lengths, method by method."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from memtrace.devices import Device
    from tidekv.plans.curve import Curve


def curves_answered(
    arguments: argparse.Namespace, methods: Mapping[str, argparse.Namespace], schema: int
) -> bool:
    """Plan each method at each length and print that; whether all of them fit.

    Args:
        schema: of ``plan --json``.

    Raises:
        TidekvError: bad input, or no virtual card can be had.
        SystemExit: a planned run failed, and has said why.
    """
    from memtrace.render import natural, show
    from tidekv.plans import cards, searches
    from tidekv.plans.curve import lengths

    prompts = lengths(arguments.prompts)
    card = cards.largest_card() if arguments.device is None else cards.card_of(arguments.device)
    for chosen in methods.values():
        chosen.device = card.key
    found = {name: searches.curve(chosen, prompts) for name, chosen in methods.items()}
    if arguments.json:
        methods_found = [{"method": name, **asdict(one)} for name, one in found.items()]
        print(json.dumps({"schema": schema, "card": card.key, "methods": methods_found}, indent=2))
    else:
        table = curves(found, prompts)
        show(table, least=natural(table))
        print(_said(arguments, card))
    return all(len(one.probes) == len(prompts) and one.probes[-1].fits for one in found.values())


def curves(found: "Mapping[str, Curve]", prompts: list[int]) -> "Table":
    """A line a prompt, two columns a method."""
    from memtrace.render import grid, size

    headers = [f"{name}, {what}" for name in found for what in ("allocated", "reserved")]
    table = grid("prompt", *headers)
    for prompt in prompts:
        cells = []
        for one in found.values():
            probe = next((probe for probe in one.probes if probe.prompt == prompt), None)
            if probe is not None and probe.fits:
                cells += [size(probe.allocated_peak), size(probe.reserved_peak)]
            else:
                cells += ["doesn't fit", "doesn't fit"]
        table.add_row(f"{prompt:,}", *cells)
    return table


def _said(arguments: argparse.Namespace, card: "Device") -> str:
    from memtrace.render import size

    return f"Peaks of a prefill of {arguments.model} on {card.name} ({size(card.total)})."
