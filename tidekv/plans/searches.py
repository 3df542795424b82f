"""Questions that take several prefills: each search is one process on the virtual card."""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tidekv.plans.capacity import Longest, Probe
from tidekv.plans.cards import card_of, largest_card
from tidekv.plans.curve import Curve
from tidekv.plans.fitting import Fit, Try
from tidekv.plans.planning import check_ended, options, run


def longest(arguments: argparse.Namespace) -> Longest:
    """The longest prompt that fits the card, up to ``arguments.up_to`` tokens.

    Raises:
        TidekvError, SystemExit: as :func:`tidekv.plans.planning.plan`.
    """
    found = _found(arguments, "tidekv.plans.capacity", "--up-to", str(arguments.up_to))
    return Longest(found["prompt"], found["shorter_than"], _probes(found))


def curve(arguments: argparse.Namespace, prompts: Sequence[int]) -> Curve:
    """Peaks of prompts of these lengths.

    Raises:
        TidekvError, SystemExit: as :func:`tidekv.plans.planning.plan`.
    """
    words = ("--prompts", ",".join(map(str, prompts)))
    return Curve(_probes(_found(arguments, "tidekv.plans.curve", *words)))


def _probes(found: Mapping[str, Any]) -> tuple[Probe, ...]:
    return tuple(Probe(**one) for one in found["probes"])


def fit(arguments: argparse.Namespace) -> tuple[Fit, int | None]:
    """What makes the prompt fit the card.

    Returns:
        What was found, and what all changes together take on the largest card of the catalogue,
        in allocated bytes, where nothing fits; None: something does, or not even that card does.

    Raises:
        TidekvError, SystemExit: as :func:`tidekv.plans.planning.plan`.
    """
    found = _fit(arguments)
    if found.proposal is not None:
        return found, None
    everything = max(found.tries, key=lambda one: len(one.changes))
    if everything.by_formula:
        needed = everything.allocated_peak
        return found, needed if needed <= largest_card().total else None
    roomy = argparse.Namespace(**{**vars(arguments), "device": largest_card().key})
    (smallest,) = _fit(roomy, "--smallest").tries
    return found, smallest.allocated_peak if smallest.fits else None


def _fit(arguments: argparse.Namespace, *more: str) -> Fit:
    card = card_of(arguments.device)
    arguments = argparse.Namespace(**{**vars(arguments), "engine": "virtual"})
    words = ("--card", card.key, "--prompt", str(arguments.prompt), *more)
    found = _found(arguments, "tidekv.plans.fitting", *words)
    tries = tuple(Try(**one) for one in found["tries"])
    return Fit(found["room"], found["proposal"], tries)


def _found(arguments: argparse.Namespace, module: str, *words: str) -> Mapping[str, Any]:
    """What a module prints that reads several prompts on the card."""
    card_of(arguments.device)
    command = [module, *options(arguments), "--device", "cuda", "--untrained", *words]
    with tempfile.TemporaryDirectory(prefix="tidekv-") as scratch:
        out = Path(scratch) / "run.memtrace"
        trace, said = run(arguments, command, out, source="none")
        check_ended(trace)
    found: Mapping[str, Any] = json.loads(said)
    return found
