"""The longest prompt that fits, in one process: ``python -m tidekv.plans.capacity OPTIONS``.

Runs where the device is, or seems to be: :mod:`tidekv.plans.searches` starts it on a virtual card.
It takes the options of ``tidekv run`` and prints one JSON object, the fields of :class:`Longest`.
"""

import argparse
import functools
import gc
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from tidekv.arguments import parser_of
from tidekv.errors import DeviceMemoryError, TidekvError
from tidekv.garbage import none_to_collect

#: Tokens; every length that is tried is a multiple of it.
STEP = 1024
#: The answer is exact to a step, or to this share of it where that is more.
_SHARE = 256


@dataclass(frozen=True)
class Probe:
    """One prompt that was tried; bytes. Peaks of one that doesn't fit are those until then."""

    prompt: int
    fits: bool
    allocated_peak: int
    reserved_peak: int


@dataclass(frozen=True)
class Longest:
    """What was found.

    Attributes:
        prompt: tokens of the longest prompt that fits; 0: none does.
        shorter_than: tokens of one that doesn't; None: the longest that was to be tried fits.
        probes: what was tried, in order.
    """

    prompt: int
    shorter_than: int | None
    probes: tuple[Probe, ...]


def search(probe: Callable[[int], Probe], *, room: int, first: int, last: int) -> Longest:
    """The longest prompt that fits, in few probes.

    Two short prompts tell what a token adds to each peak. Allocated bytes are linear in the prompt:
    where they meet ``room`` is an upper bound. Reserved bytes meet it earlier, but an allocator
    that is short of memory gives back what it caches, so what lies between is halved.

    Args:
        probe: tries a prompt of so many tokens.
        room: bytes of the device that an allocator can have.
        first: the shortest prompt to try, a multiple of a step.
        last: the longest, another one.
    """
    tried: dict[int, Probe] = {}

    def fits(prompt: int) -> bool:
        if prompt not in tried:
            tried[prompt] = probe(prompt)
        return tried[prompt].fits

    def answer(prompt: int, shorter_than: int | None) -> Longest:
        return Longest(prompt, shorter_than, tuple(tried.values()))

    low, high, guess = 0, min(first, last), 0  # low fits; high doesn't, or it will be tried
    step = STEP
    if fits(high):
        low, high = high, min(2 * high, last)
        if fits(high):
            one, two = tried[low], tried[high]
            low = high
            guess = _meets(room, one, two, "reserved_peak")
            high = _meets(room, one, two, "allocated_peak")
            if not low <= high < last:
                if fits(last):
                    return answer(last, None)
                high = last
            else:
                high += STEP
            step = max(STEP, _floor(high // _SHARE))
    while True:
        while high - low > step:
            middle = guess if low < guess < high else _floor((low + high) // 2)
            if fits(middle):
                low = middle
            else:
                high = middle
        if not fits(high):
            return answer(low, high)
        if high == last:
            return answer(last, None)
        low, high = high, min(high + step, last)  # the bound was some bytes too low


def _meets(room: int, one: Probe, two: Probe, what: str) -> int:
    """Where a line through the bytes of two prompts meets ``room``, in whole steps; 0: nowhere."""
    first, second = getattr(one, what), getattr(two, what)
    if second <= first:
        return 0
    more: int = (room - second) * (two.prompt - one.prompt) // (second - first)
    return _floor(two.prompt + more)


def _floor(tokens: int) -> int:
    return tokens // STEP * STEP


def ceiling(tokens: int) -> int:
    """The next multiple of a step."""
    return -(-tokens // STEP) * STEP


def main(argv: list[str] | None = None) -> int:
    """Search; a model that doesn't fit is an answer of 0 tokens."""
    parser = parser_of("python -m tidekv.plans.capacity", __doc__)
    parser.add_argument("--up-to", type=int, required=True, metavar="N")
    return answer(parser.parse_args(argv), _longest)


def answer(arguments: argparse.Namespace, find: Callable[[argparse.Namespace], Any]) -> int:
    """Print the fields of the dataclass that is found; the exit status."""
    try:
        found = find(arguments)
    except TidekvError as error:
        print(f"tidekv: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130
    print(json.dumps(asdict(found)))
    return 0


def _longest(arguments: argparse.Namespace) -> Longest:
    loaded = load(arguments)
    if loaded is None:
        return Longest(0, STEP, ())
    import torch

    forget()
    room = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    budget = arguments.budget
    first = ceiling(max(8 * STEP, budget if isinstance(budget, int) else 0))
    probe = functools.partial(tried, arguments, loaded)
    return search(probe, room=room, first=first, last=ceiling(arguments.up_to))


def load(arguments: argparse.Namespace) -> Any | None:
    """What ``tidekv run`` loads; None: not even the model fits."""
    with none_to_collect():
        from tidekv import running

    try:
        with running.memory_errors():
            return running.load(arguments)
    except DeviceMemoryError:
        return None


def tried(arguments: argparse.Namespace, loaded: Any, prompt: int) -> Probe:
    """Read a prompt of so many tokens with a loaded model, as if it were the first one."""
    import torch

    from tidekv import running

    budget = arguments.budget
    if isinstance(budget, int):  # a short prompt has no more rows
        arguments = argparse.Namespace(**{**vars(arguments), "budget": min(budget, prompt)})
    forget()
    try:
        with running.memory_errors():
            read(arguments, loaded, prompt, f"Trying {prompt:,} tokens")
    except DeviceMemoryError:
        fits = False
    else:
        fits = True
    return Probe(prompt, fits, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


def read(arguments: argparse.Namespace, loaded: Any, prompt: int, description: str) -> None:
    """Read a prompt of so many tokens, with a progress bar."""
    from tidekv import running
    from tidekv.progress import progress_bar

    ids = running.random_prompt(loaded.model, arguments.batch, prompt)
    ids = running.beside_embeddings(loaded.model, ids)
    layers = loaded.model.config.num_hidden_layers
    with progress_bar(description, total=layers) as done:
        running.read(arguments, loaded, ids, done)


def forget() -> None:
    """Leave nothing of what was tried before, so that each prompt is as the first one."""
    import torch

    gc.collect()  # what an error held
    torch._C._cuda_clearCublasWorkspaces()  # else it stays where the first prompt had room
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    sys.exit(main())
