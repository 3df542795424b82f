"""What can be wrong with the command line of ``tidekv plan``, as far as is known without torch.

What schedules, selectors and caches say of their parameters the planned process finds, some seconds
later.
"""

import argparse
from collections.abc import Iterable

from tidekv import budgets
from tidekv.arguments import MOST, flag_of
from tidekv.errors import TidekvError, check_choice
from tidekv.formulas.asked import DEFAULTS
from tidekv.loading import SMOLLM2, config_of
from tidekv.names import ATTENTIONS, DTYPES, SCORINGS
from tidekv.shapes import shape_of


def check(arguments: argparse.Namespace, methods: Iterable[argparse.Namespace]) -> None:
    """
    Args:
        methods: the command line with each method that is to be planned.

    Raises:
        TidekvError: bad input.
    """
    _check_questions(arguments)
    for chosen in methods:
        _check_method(chosen)


def _check_questions(arguments: argparse.Namespace) -> None:
    if arguments.prompts is not None and (
        arguments.max_context
        or arguments.min_device
        or arguments.fit
        or arguments.torch
        or arguments.output is not None
        or arguments.prompt is not None
    ):
        raise TidekvError("--prompts keeps no run and goes with none but --compare and --device.")
    if arguments.max_context and (
        arguments.min_device or arguments.fit or arguments.output is not None
    ):
        raise TidekvError("--max-context keeps no run and goes without --min-device, --fit and -o.")
    if arguments.torch and (arguments.max_context or arguments.fit or arguments.min_device):
        raise TidekvError("--torch goes with --prompt and --compare alone.")
    if arguments.fit:
        if arguments.min_device or arguments.compare or arguments.output is not None:
            raise TidekvError("--fit keeps no run and goes without --compare, --min-device and -o.")
        if arguments.schedule != "layer_major":
            raise TidekvError("--fit changes what layer_major alone has; use that schedule.")
        if arguments.engine == "fake":
            raise TidekvError("--fit counts what goes over the bus, as the engine virtual does.")
    if arguments.min_device and arguments.compare:
        raise TidekvError("--min-device is about one method; drop --compare, or plan each.")
    asked = (arguments.prompt is not None, arguments.max_context, arguments.prompts is not None)
    if sum(asked) != 1:
        raise TidekvError("Give either --prompt N, --prompts N,N,… or --max-context.")
    for name in ("prompt", "up_to", "batch"):
        value = getattr(arguments, name)
        if value is not None and not 1 <= value <= MOST:
            raise TidekvError(
                f"{flag_of(name)} must be at least 1 and at most {MOST:,}, not {value:,}."
            )
    if arguments.device == "cpu" and (
        arguments.max_context
        or arguments.min_device
        or arguments.fit
        or arguments.prompts is not None
        or arguments.allocator
        or arguments.torch
    ):
        raise TidekvError(
            "A plan for the CPU knows no limit and no allocator; drop --max-context, --min-device, "
            "--fit, --prompts, --allocator and --torch, or name a card."
        )
    if arguments.device is None and not arguments.min_device and arguments.prompts is None:
        raise TidekvError("--device is missing: name a card of memtrace devices.")


def _check_method(arguments: argparse.Namespace) -> None:
    names = {"attention": ATTENTIONS, "scoring": SCORINGS, **DEFAULTS}
    for what, known in names.items():
        check_choice(what, getattr(arguments, what), known)
    if arguments.dtype is not None:
        check_choice("dtype", arguments.dtype, DTYPES)
    for name in ("chunk_size", "piece_rows"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise TidekvError(f"{flag_of(name)} must be at least 1 row, not {value}.")
    if arguments.selector != "none" and arguments.budget is not None:
        budgets.rows(arguments.budget, arguments.prompt or MOST)
    if arguments.model != SMOLLM2:  # which may have to be made first
        shape_of(config_of(arguments.model), arguments.dtype)
