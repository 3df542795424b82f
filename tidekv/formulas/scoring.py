"""What scoring a layer's rows takes, by selector.

See :mod:`tidekv.scoring` and :mod:`tidekv.selectors`, whose code this counts. Not counted is the
scratch of PyTorch's reductions over many rows into few numbers (KeyDiff's anchor).
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

from tidekv.formulas.moments import Case, Moment, Tensor, beside, temp, tensor

#: Queries that H2O reads at a time.
_QUERIES = 32
#: Scores that are merged into the best so far at a time, if that is more than there are of those.
_MERGED = 1024
#: Numbers that PyTorch sorts where they are; more it hands to cub.
_SORTED_IN_PLACE = 4096


def scoring(case: Case, present: int, kept: int) -> Iterator[Moment]:
    """Scores of ``present`` rows, and the best ``kept`` of them."""
    return _SELECTORS[case.selector](case, present, kept) if case.selector else iter(())


def observing(case: Case, rows: int, present: int) -> Iterator[Moment]:
    """H2O sees a chunk's queries, a few at a time, and the keys up to their own.

    Where these are on the host they visit.
    """
    if case.selector != "h2o":
        return
    size = case.batch * case.shape.kv_heads * present * case.shape.head * case.shape.element
    keys = tensor("KV_res/full", "K of a layer, B·Hkv·P·D·b", size, 1 if case.by_head else 0)
    yield from beside((keys,), _observing(case, rows, present))


def _observing(case: Case, rows: int, present: int) -> Iterator[Moment]:
    lines = case.batch * case.shape.kv_heads
    parts = [min(_QUERIES, rows - start) for start in range(0, rows, _QUERIES)]
    for number in dict.fromkeys((0, len(parts) - 2, len(parts) - 1)):
        if 0 <= number < len(parts):
            window = parts[number]
            prefix = present - rows + number * _QUERIES
            own = temp("sums of the queries before, 4·B·Hkv·W", 4 * lines * _QUERIES)
            yield from _passes(
                case,
                window,
                prefix,
                case.block,
                first=(own,) if number else (),
                later=(temp("sums of the block before, 4·B·Hkv·b_s", 4 * lines * case.block),),
            )


def _snapkv(case: Case, present: int, kept: int) -> Iterator[Moment]:
    """Scores of all rows before the window, in blocks whose neighbours are pooled."""
    lines, prefix = case.batch * case.shape.kv_heads, present - case.window
    scores = temp("scores, 4·B·Hkv·(S-W)", 4 * lines * prefix)
    halo = temp("sums of neighbours, 8·B·Hkv·⌊kernel/2⌋", 8 * lines * (case.pooled // 2))
    passes = _passes(case, case.window, prefix, case.block, first=(), later=(halo,))
    yield from beside((scores,), passes)
    count = kept - case.window - case.sinks
    yield from beside((scores,), _best(lines, case.sinks, prefix, count))


def _tova(case: Case, present: int, kept: int) -> Iterator[Moment]:
    """As :func:`_snapkv` with one query; then the mean over KV heads."""
    lines, prefix = case.batch * case.shape.kv_heads, present - 1
    scores = temp("scores, 4·B·Hkv·(S-1)", 4 * lines * prefix)
    yield from beside((scores,), _passes(case, 1, prefix, case.block, first=(), later=()))
    mean = temp("mean of the heads' scores, 4·B·(S-1)", 4 * case.batch * prefix)
    yield Moment("scoring", (scores, mean))
    yield from beside((mean,), _best(case.batch, 0, prefix, kept - 1))


def _chunkkv(case: Case, present: int, _: int) -> Iterator[Moment]:
    """Sums of each chunk of rows, in blocks of whole chunks."""
    block = -(-case.block // case.row_chunk) * case.row_chunk
    sums = temp("sums of a block's chunks, 4·B·b_s/chunk", 4 * case.batch * block // case.row_chunk)
    return _passes(case, case.window, present - case.window, block, first=(), later=(), each=sums)


def _adakv(case: Case, present: int, _: int) -> Iterator[Moment]:
    """As :func:`_snapkv`. Sharing rows among heads takes less than the rows do."""
    return _snapkv(case, present, case.window + case.sinks)


def _cake(case: Case, present: int, kept: int) -> Iterator[Moment]:
    """As :func:`_snapkv`, with variance, mean and entropy of each key, the last in fp64 too."""
    lines, prefix = case.batch * case.shape.kv_heads, present - case.window
    held = (temp("scores, 4·B·Hkv·(S-W)", 4 * lines * prefix), temp("entropy, variance", 8, 2))
    halo = temp("sums of neighbours, 8·B·Hkv·⌊kernel/2⌋", 8 * lines * (case.pooled // 2))
    passes = _passes(
        case, case.window, prefix, case.block, first=(), later=(halo,), found=(4, 4, 4, 8)
    )
    yield from beside(held, passes)
    yield from beside(held, _best(lines, 0, prefix, kept - case.window))


def _knorm(case: Case, present: int, kept: int) -> Iterator[Moment]:
    lines = case.batch * case.shape.kv_heads
    return beside((temp("norms, 4·B·Hkv·S", 4 * lines * present),), _best(lines, 0, present, kept))


def _keydiff(case: Case, present: int, kept: int) -> Iterator[Moment]:
    """A block of keys in fp32, its norms, and its keys divided by them."""
    s, lines = case.shape, case.batch * case.shape.kv_heads
    scores = temp("scores, 4·B·Hkv·S", 4 * lines * present)
    block = min(case.block, present)
    wide = temp("keys of a block in fp32, 4·B·Hkv·b_s·D", 4 * lines * block * s.head)
    held = (
        scores,
        temp("anchor, 4·B·Hkv·D", 4 * lines * s.head),
        wide,
        temp("norms of a block, 4·B·Hkv·b_s", 4 * lines * block),
    )
    yield Moment("scoring", (*held, *((wide,) if s.element < 4 else ())))
    yield from beside((scores, held[1]), _best(lines, 0, present, kept))


def _h2o(case: Case, present: int, kept: int) -> Iterator[Moment]:
    """What it saw is there; half of the rows are the last ones."""
    recent = kept // 2
    lines = case.batch * case.shape.kv_heads
    return beside(sums(case), _best(lines, 0, present - recent, kept - recent))


def sums(case: Case, layers: int = 1) -> Iterator[Tensor]:
    """What H2O holds of layers that saw a chunk, until their ends."""
    if case.selector == "h2o":
        size = 4 * case.batch * case.shape.kv_heads * case.prompt
        yield temp("sums of every row's weights, 4·B·Hkv·S", size, layers)


def _nothing(case: Case, present: int, kept: int) -> Iterator[Moment]:
    return iter(())


_SELECTORS: Mapping[str, Callable[[Case, int, int], Iterator[Moment]]] = {
    "snapkv": _snapkv,
    "pyramidkv": _snapkv,
    "adakv": _adakv,
    "cake": _cake,
    "chunkkv": _chunkkv,
    "tova": _tova,
    "keydiff": _keydiff,
    "knorm": _knorm,
    "h2o": _h2o,
    "streamingllm": _nothing,
    "recent": _nothing,
    "random": _nothing,  # on the host
}


def _passes(
    case: Case,
    window: int,
    prefix: int,
    block: int,
    *,
    first: tuple[Tensor, ...],
    later: tuple[Tensor, ...],
    each: Tensor | None = None,
    found: tuple[int, ...] = (4,),
) -> Iterator[Moment]:
    """Both passes over the keys before a window: O(B·Hq·(W·b_s + W²) + B·Hkv·b_s·D), in fp32.

    In the first the logits of the window's own keys stay until those of the first block are there;
    in the second a block's weights are summed up over the window.

    Args:
        first: held meanwhile, in the second pass during the first block only.
        later: held in the second pass during all others.
        each: what each block leaves.
        found: bytes of the numbers that become of a key's weights.
    """
    heads = case.batch * case.shape.query_heads
    held = (
        temp("scaled queries, 4·B·Hq·W·D", 4 * heads * window * case.shape.head),
        temp("maximum and sum of each query, 4·B·Hq·W", 4 * heads * window, 2),
    )
    own = temp("the window's own logits, 4·B·Hq·W²", 4 * heads * window**2)
    yield Moment("scoring", (*first, *held, own, *_logits(case, window, min(block, prefix))))
    ends = [0, *range(block, prefix, block), prefix]
    spans = [end - start for start, end in pairwise(ends)]
    for number in dict.fromkeys((0, 1, len(spans) - 2, len(spans) - 1)):
        if not 0 <= number < len(spans):
            continue
        around = (*held, *(later if number else first))
        if each is not None:
            around += (Tensor(each.component, each.what, each.bytes, number),)
        logits, *keys = _logits(case, window, spans[number])
        sums = (temp("sums over the window, 4·B·Hq·b_s", n * heads * spans[number]) for n in found)
        yield Moment("scoring", (*around, logits, *keys))
        yield Moment("scoring", (*around, logits, *sums))


def _logits(case: Case, window: int, rows: int) -> Iterator[Tensor]:
    s = case.shape
    yield temp("logits of a block, 4·B·Hq·W·b_s", 4 * case.batch * s.query_heads * window * rows)
    if s.element < 4:
        size = 4 * case.batch * s.kv_heads * rows * s.head
        yield temp("keys of a block in fp32, 4·B·Hkv·b_s·D", size)


def _best(lines: int, first: int, candidates: int, count: int) -> Iterator[Moment]:
    """The best ``count`` of each line's scores: merged block by block into the best so far.

    Alive are both, the sorted ones and their order, that of the block before, and positions. Where
    that are more numbers than PyTorch sorts in place, the rows themselves, copied right after, take
    more than cub's buffers: 4·D·b bytes of each against some 56 of its score and another.
    """
    step, order = max(count, _MERGED), 0
    for start in range(first, candidates, step):
        width = min(step, candidates - start)
        top = min(count, start - first)
        both = top + width
        if both > _SORTED_IN_PLACE:
            return
        number = temp("scores of the best and a block, 4·B·Hkv·(K+n)", 4 * lines * both)
        index = temp("their order, 8·B·Hkv·(K+n)", 8 * lines * both)
        yield Moment(
            "choosing",
            (
                *(number, number, index),
                temp("the order before", 8 * lines * order),
                temp("the best and their positions, 12·B·Hkv·K", 4 * lines * top),
                temp("the best and their positions, 12·B·Hkv·K", 8 * lines * top),
                temp("positions, 8·n", 8 * width),
                temp("positions, 8·(K+n)", 8 * both),
            ),
        )
        order = both
