"""What makes a prompt fit a card, cheapest first: ``python -m tidekv.plans.fitting OPTIONS``.

The changes that a layer-major prefill allows, and what each costs:

- smaller chunks, then smaller pieces of the MLP: more and smaller kernels, nothing else;
- parts of the prefill on the host, in the order of the bytes that they move over the bus, by
  :func:`bus_bytes`: finished layers' caches, embeddings and head, weights, hidden states.

They make a ladder. Its rungs are tried until one fits; then each of its changes is left out, the
dearest first, if it fits without. Where formulas know what is allocated, that decides at first, and
what they arrive at is run: of a long prompt a run takes a minute. All of it happens in one process
where the device is, or seems to be: :mod:`tidekv.plans.searches` starts it on a virtual card. It
prints one JSON object, the fields of :class:`Fit`.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tidekv.arguments import parser_of
from tidekv.errors import DeviceMemoryError
from tidekv.formulas import peak
from tidekv.formulas.asked import DEFAULTS, UnknownFormula, case_of
from tidekv.garbage import none_to_collect
from tidekv.plans.capacity import answer, forget, read
from tidekv.shapes import Shape

#: Options of the command line and what they become.
Changes = Mapping[str, int | bool]

#: Smaller ones save a few MiB and take several times as many kernels.
_LEAST = {"chunk_size": 512, "piece_rows": 128}
#: On the host, in the order of what they usually move.
_PLACED = ("park_caches", "host_embeddings", "stream_weights", "host_bridge")


@dataclass(frozen=True)
class Try:
    """One prefill with some changes; bytes.

    Attributes:
        by_formula: it wasn't run, since formulas say that it doesn't fit.
        allocated_peak: by formula then; of a run that doesn't fit until it failed.
        reserved_peak: None: it wasn't run.
        to_device, to_host: what the prefill moved over the bus; 0 where it didn't come to its end.
    """

    changes: Changes
    fits: bool
    by_formula: bool
    allocated_peak: int
    reserved_peak: int | None
    to_device: int = 0
    to_host: int = 0


@dataclass(frozen=True)
class Fit:
    """What was found.

    Attributes:
        room: bytes of the device that an allocator can have.
        proposal: the cheapest changes that fit; None: none do.
        tries: in order.
    """

    room: int
    proposal: Changes | None
    tries: tuple[Try, ...]


def bus_bytes(shape: Shape, batch: int, prompt: int, rows: int) -> dict[str, int]:
    """What each part moves if it is on the host.

    Caches 2·N·B·Hkv·K·D·b, once; rows of embeddings and the head (B·S + V)·d·b; the weights of all
    layers; hidden states 2·N·B·S·d·b, out and back for each layer.
    """
    caches = 2 * shape.layers * batch * rows * shape.kv_heads * shape.head
    hidden = batch * prompt * shape.hidden * shape.element
    return {
        "park_caches": caches * shape.element,
        "host_embeddings": hidden + shape.vocabulary * shape.hidden * shape.element,
        "stream_weights": shape.layers * sum(shape.layer()),
        "host_bridge": 2 * shape.layers * hidden,
    }


def ladder(sizes: Mapping[str, int], on_device: list[str]) -> Iterator[Changes]:
    """What is tried, cheapest first.

    Args:
        sizes: of chunks and pieces as asked for.
        on_device: parts that may go to the host, the cheapest first.
    """
    yield {}
    smaller: dict[str, int | bool] = {}
    for name, least in _LEAST.items():
        if sizes[name] > least:
            smaller[name] = least
            yield dict(smaller)
    placed: dict[str, int | bool] = {}
    for name in on_device:
        placed[name] = True
        yield dict(placed)
    if smaller and placed:
        yield {**smaller, **placed}


def propose(
    expected: Callable[[Changes], bool | None],
    fits: Callable[[Changes], bool],
    rungs: Sequence[Changes],
) -> Changes | None:
    """The first rung that fits, less what it fits without; None: none does.

    Where no room is expected there is none. Where it is, what is proposed by that is tried, and
    proposed anew should it not fit.

    Args:
        expected: whether there is room; None: not known. Asked once for each set of changes.
        fits: tries. Asked at most once for each set of changes.
    """
    guessed: dict[frozenset[str], bool | None] = {}
    known: dict[frozenset[str], bool] = {}

    def tried(changes: Changes) -> bool:
        names = frozenset(changes)
        if names not in known:
            known[names] = fits(changes)
        return known[names]

    def guess(changes: Changes) -> bool:
        names = frozenset(changes)
        if names in known:
            return known[names]
        if names not in guessed:
            guessed[names] = expected(changes)
        found = guessed[names]
        return tried(changes) if found is None else found

    while True:
        found = next((rung for rung in rungs if guess(rung)), None)
        if found is None:
            return None
        for name in reversed(list(found)):
            without = {other: value for other, value in found.items() if other != name}
            if guess(without):
                found = without
        if tried(found):
            return found


def main(argv: list[str] | None = None) -> int:
    """Try; a prompt that fits in no way is an answer."""
    parser = parser_of("python -m tidekv.plans.fitting", __doc__)
    parser.add_argument("--prompt", type=int, required=True, metavar="N")
    parser.add_argument("--card", required=True, help="of the catalogue, which the device is")
    parser.add_argument("--smallest", action="store_true", help="try the last rung alone")
    return answer(parser.parse_args(argv), _fit)


def _fit(arguments: argparse.Namespace) -> Fit:
    with none_to_collect():
        import torch

        from tidekv import running
    running.methods_of(arguments)  # whether it can be at all
    forget()
    room = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    tries: list[Try] = []

    def expected(changes: Changes) -> bool | None:
        needed = _by_formula(argparse.Namespace(**{**vars(arguments), **changes}))
        if needed is None:
            return None
        if needed > room:
            tries.append(Try(changes, False, True, needed, None))
        return needed <= room

    def fits(changes: Changes) -> bool:
        tries.append(_try(arguments, changes))
        return tries[-1].fits

    rungs = list(ladder(_sizes(arguments), _on_device(arguments)))
    if arguments.smallest:
        found = rungs[-1] if fits(rungs[-1]) else None
    else:
        found = propose(expected, fits, rungs)
    return Fit(room, found, tuple(tries))


def _sizes(arguments: argparse.Namespace) -> dict[str, int]:
    """Of chunks and pieces, as asked for or by default."""
    defaults = DEFAULTS["schedule"]["layer_major"]
    given = dict(pair.split("=", 1) for pair in arguments.schedule_option if "=" in pair)
    return {
        name: getattr(arguments, name) or int(given.get(name, defaults[name])) for name in _LEAST
    }


def _on_device(arguments: argparse.Namespace) -> list[str]:
    """What may still go to the host, the cheapest first."""
    from tidekv import budgets
    from tidekv.loading import config_of
    from tidekv.running import budget_of
    from tidekv.shapes import shape_of

    free = [name for name in _PLACED if not getattr(arguments, name)]
    shape = shape_of(config_of(arguments.model), arguments.dtype)
    if shape is None:
        return free
    rows = arguments.prompt
    if arguments.selector != "none":
        rows = budgets.rows(budget_of(arguments, arguments.prompt), arguments.prompt)
    moved = bus_bytes(shape, arguments.batch, arguments.prompt, rows)
    return sorted(free, key=moved.__getitem__)


def _try(asked: argparse.Namespace, changes: Changes) -> Try:
    import torch

    from memtrace.virtual_gpu.bus import moved
    from tidekv import running

    arguments = argparse.Namespace(**{**vars(asked), **changes})
    what = ", ".join(name.replace("_", " ") for name in changes) or "what was asked for"
    over = 0, 0
    forget()
    try:
        with running.memory_errors():
            loaded = running.load(arguments)
            before = moved()
            read(arguments, loaded, arguments.prompt, f"Trying {what}")
    except DeviceMemoryError:
        fits = False
    else:
        fits, after = True, moved()
        over = after.to_device - before.to_device, after.to_host - before.to_host
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return Try(changes, fits, False, allocated, reserved, *over)


def _by_formula(arguments: argparse.Namespace) -> int | None:
    """Bytes allocated at the peak; None: formulas don't know."""
    from tidekv.plans.cards import card_of

    try:
        return peak(case_of(arguments, card_of(arguments.card))).total
    except UnknownFormula:
        return None


if __name__ == "__main__":
    sys.exit(main())
