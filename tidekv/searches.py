"""Questions that take several prefills: each search is one process on the virtual card."""

import argparse
import json
import tempfile
from pathlib import Path

from tidekv.capacity import Longest, Probe
from tidekv.cards import card_of, largest_card
from tidekv.fitting import Fit, Try
from tidekv.planning import check_ended, options, run


def longest(arguments: argparse.Namespace) -> Longest:
    """The longest prompt that fits the card, up to ``arguments.up_to`` tokens.

    Raises:
        TidekvError, SystemExit: as :func:`tidekv.planning.plan`.
    """
    card_of(arguments.device)
    words = [*options(arguments), "--device", "cuda", "--untrained"]
    words += ["--up-to", str(arguments.up_to)]
    with tempfile.TemporaryDirectory(prefix="tidekv-") as scratch:
        out = Path(scratch) / "capacity.memtrace"
        trace, said = run(arguments, ["tidekv.capacity", *words], out, source="none")
        check_ended(trace)
    found = json.loads(said)
    return Longest(
        found["prompt"], found["shorter_than"], tuple(Probe(**one) for one in found["probes"])
    )


def fit(arguments: argparse.Namespace) -> tuple[Fit, int | None]:
    """What makes the prompt fit the card.

    Returns:
        What was found, and what all changes together take on the largest card of the catalogue,
        in allocated bytes, where nothing fits; None: something does, or not even that card does.

    Raises:
        TidekvError, SystemExit: as :func:`tidekv.planning.plan`.
    """
    found = _fit(arguments)
    if found.proposal is not None:
        return found, None
    roomy = argparse.Namespace(**{**vars(arguments), "device": largest_card().key})
    (smallest,) = _fit(roomy, "--smallest").tries
    return found, smallest.allocated_peak if smallest.fits else None


def _fit(arguments: argparse.Namespace, *more: str) -> Fit:
    card = card_of(arguments.device)
    arguments = argparse.Namespace(**{**vars(arguments), "engine": "virtual"})
    words = [*options(arguments), "--device", "cuda", "--untrained", "--card", card.key]
    words += ["--prompt", str(arguments.prompt), *more]
    with tempfile.TemporaryDirectory(prefix="tidekv-") as scratch:
        out = Path(scratch) / "fit.memtrace"
        trace, said = run(arguments, ["tidekv.fitting", *words], out, source="none")
        check_ended(trace)
    found = json.loads(said)
    tries = tuple(Try(**one) for one in found["tries"])
    return Fit(found["room"], found["proposal"], tries)
