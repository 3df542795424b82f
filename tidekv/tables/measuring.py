"""Prefills one after the other in one process: ``python -m tidekv.tables.measuring < JOBS``.

Runs where the device is, or seems to be: :mod:`tidekv.tables.memory` starts it on a virtual card.
Standard input is a JSON list of ``[options of tidekv run, prompt tokens]``, all of one model; for
each there is a line of JSON on standard output, the fields of :class:`Measured`.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

from tidekv.arguments import parser_of
from tidekv.errors import DeviceMemoryError, TidekvError
from tidekv.plans.capacity import forget


@dataclass(frozen=True)
class Measured:
    """What a prefill took of the device, in bytes; peaks of one that fails are those until then.

    Attributes:
        steady: allocated once the prompt was read; None: it doesn't fit.
        cache: of it, the cache.
    """

    fits: bool
    allocated_peak: int
    reserved_peak: int
    steady: int | None
    cache: int | None


def main() -> int:
    """Measure each."""
    jobs = [(_parsed(words), prompt) for words, prompt in json.load(sys.stdin)]
    try:
        for measured in _each(jobs):
            print(json.dumps(asdict(measured)), flush=True)
    except TidekvError as error:
        print(f"tidekv: {error}", file=sys.stderr)
        return error.exit_status
    return 0


def _parsed(words: list[str]) -> argparse.Namespace:
    parser = parser_of("python -m tidekv.tables.measuring", __doc__)
    parser.set_defaults(device="cuda", untrained=True)
    return parser.parse_args(words)


def _each(jobs: list[tuple[argparse.Namespace, int]]) -> Any:
    from tidekv import running

    loaded = None
    for arguments, prompt in jobs:
        if loaded is None:
            loaded = running.load(arguments)
        yield _measure(arguments, replace(loaded, methods=running.methods_of(arguments)), prompt)


def _measure(arguments: argparse.Namespace, loaded: Any, prompt: int) -> Measured:
    import torch

    from tidekv import running

    forget()
    steady = cache = None
    try:
        with running.memory_errors():
            ids = running.random_prompt(loaded.model, arguments.batch, prompt)
            prefilled = running.read(arguments, loaded, ids.to(arguments.device), lambda: None)
            steady, cache = torch.cuda.memory_allocated(), prefilled.cache.nbytes()
    except DeviceMemoryError:
        pass
    return Measured(
        steady is not None,
        torch.cuda.max_memory_allocated(),
        torch.cuda.max_memory_reserved(),
        steady,
        cache,
    )


if __name__ == "__main__":
    sys.exit(main())
