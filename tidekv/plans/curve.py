"""What prompts of several lengths take, in one process: ``python -m tidekv.plans.curve OPTIONS``.

Runs where the device is, or seems to be: :mod:`tidekv.plans.searches` starts it on a virtual card.
It takes the options of ``tidekv run`` and prints one JSON object, the fields of :class:`Curve`.
"""

import argparse
import sys
from dataclasses import dataclass

from tidekv.arguments import MOST, parser_of
from tidekv.errors import InfeasibleError
from tidekv.plans.capacity import Probe, answer, load, tried


@dataclass(frozen=True)
class Curve:
    """Peaks by prompt length.

    Attributes:
        probes: the shortest first. The last one that was tried may not fit; longer ones weren't.
    """

    probes: tuple[Probe, ...]


def lengths(text: str) -> list[int]:
    """``"8192,16384"`` → those lengths in tokens, the shortest first.

    Raises:
        InfeasibleError: these are no lengths.
    """
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or not 1 <= found[0] <= found[-1] <= MOST:
        raise InfeasibleError(f"--prompts {text!r} is no list of lengths; write it as 8192,16384.")
    return found


def main(argv: list[str] | None = None) -> int:
    """Try each; a model that doesn't fit is an answer without any."""
    parser = parser_of("python -m tidekv.plans.curve", __doc__)
    parser.add_argument("--prompts", required=True, metavar="N,N,…")
    return answer(parser.parse_args(argv), _curve)


def _curve(arguments: argparse.Namespace) -> Curve:
    loaded = load(arguments)
    if loaded is None:
        return Curve(())
    probes: list[Probe] = []
    for prompt in lengths(arguments.prompts):
        probes.append(tried(arguments, loaded, prompt))
        if not probes[-1].fits:
            break
    return Curve(tuple(probes))


if __name__ == "__main__":
    sys.exit(main())
