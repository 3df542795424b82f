"""What a kernel of attention holds besides queries, keys and values.

``flash`` is PyTorch's FlashAttention; ``efficient`` its memory-efficient kernel, which takes prefix
and chunk apart; ``math`` PyTorch's attention in plain operators; ``eager`` our own. See
:mod:`tidekv.attention`, whose code this counts.
"""

from collections.abc import Iterator
from dataclasses import replace

from tidekv.formulas.moments import Case, Moment, Tensor, act, beside, tensor
from tidekv.shapes import Shape

#: Rows to which the memory-efficient kernel pads its log-sum-exp.
_PADDED = 32
#: FlashAttention never splits the keys into more parts.
_MOST_SPLITS = 128


def kernel_of(attention: str, shape: Shape) -> str | None:
    """What :func:`tidekv.attention.decide` takes on CUDA; None: nothing that formulas know."""
    if attention == "eager":
        return attention
    if attention == "sdpa_math":
        return "math"
    flash = shape.element == 2 and shape.head % 8 == 0 and shape.head <= 256
    if flash and attention != "sdpa_efficient":
        return "flash"
    # Larger heads of 16 bits are summed up in a buffer of their own.
    wide = shape.head % 4 == 0 if shape.element == 4 else shape.head % 8 == 0 and shape.head <= 128
    return "efficient" if attention in ("sdpa", "sdpa_efficient") and wide else None


def moments(case: Case, rows: int, present: int) -> Iterator[Moment]:
    """Attention of a chunk's ``rows`` to the ``present`` keys up to its end."""
    if case.by_head:
        yield from _by_head(case, rows, present)
    elif case.kernel == "flash":
        yield flash(case, rows, present)
    elif case.kernel == "eager":
        yield from _eager(case, rows, present)
    elif case.kernel == "math":
        mask = tensor("backend", "mask, C·P·b", rows * present * case.shape.element)
        yield from beside((mask,), math(case, rows, present, case.shape.kv_heads))
    else:
        yield from _efficient(case, rows, present)


def output(case: Case, rows: int) -> Tensor:
    """What attention gives."""
    return act("attention's output, B·C·Hq·D·b", _outputs(case, rows))


def rows_first(case: Case, rows: int, present: int) -> bool:
    """Whether the output lies in memory as (B, C, Hq, D), so that heads are joined by a view."""
    if case.by_head:
        return False
    return case.kernel == "flash" or (case.kernel == "efficient" and rows == present)


def _by_head(case: Case, rows: int, present: int) -> Iterator[Moment]:
    """The output of all heads; keys and values of one KV head, and what its queries take."""
    s = case.shape
    one = replace(s, query_heads=s.query_heads // s.kv_heads, kv_heads=1)
    size = case.batch * present * s.head * s.element
    visiting = tensor("KV_res/full", "K and V of a head, B·P·D·b", size, 2)
    alone = replace(case, schedule="", shape=one)
    yield from beside((output(case, rows), visiting), moments(alone, rows, present))


def flash(case: Case, rows: int, present: int) -> Moment:
    """Output, log-sum-exp in fp32, seed and offset of a dropout that isn't.

    Where heads and rows are too few for the card's processors the keys are split, and each part has
    an output and a log-sum-exp of its own, in fp32 (``set_params_splitkv``, whose head sizes are
    multiples of 32). One row of several heads is computed as several rows of one.
    """
    s, heads = case.shape, case.shape.query_heads
    if rows == 1:
        rows, heads = heads // s.kv_heads, s.kv_heads
    lines = case.batch * heads * rows
    found = [
        act("attention's output, B·C·Hq·D·b", lines * s.head * s.element),
        act("log-sum-exp, 4·B·Hq·C", 4 * lines),
        act("seed and offset", 8, 2),
    ]
    splits = _splits(case, rows, present, heads)
    if splits > 1:
        padded = -(-s.head // 32) * 32
        found += [
            act("output of each part of the keys, 4·parts·B·Hq·C·D", 4 * splits * lines * padded),
            act("log-sum-exp of each part of the keys, 4·parts·B·Hq·C", 4 * splits * lines),
        ]
    return Moment("attention", tuple(found))


def _splits(case: Case, rows: int, present: int, heads: int) -> int:
    """FlashAttention's ``num_splits_heuristic``: the fewest parts that fill 85 % as well as any.

    Blocks are of 64 rows and of 64 to 256 keys; a processor takes two blocks at a time.
    """
    keys = next(
        keys for size, keys in ((64, 256), (128, 128), (256, 64)) if case.shape.head <= size
    )
    blocks = case.batch * heads * -(-rows // 64)
    room, columns = 2 * case.processors, -(-present // keys)
    if blocks >= 0.8 * room:
        return 1
    share = {}
    for parts in range(1, min(_MOST_SPLITS, room, columns) + 1):
        if parts == 1 or -(-columns // parts) != -(-columns // (parts - 1)):
            waves = blocks * parts / room
            share[parts] = waves / -(-blocks * parts // room)
    return next(parts for parts, one in share.items() if one >= 0.85 * max(share.values()))


def math(case: Case, rows: int, present: int, heads: int) -> Iterator[Moment]:
    """``_scaled_dot_product_attention_math``: of 16 bits copies in fp32, then fp32 throughout.

    Queries are scaled into another tensor, K and V expanded to the query heads if they have fewer
    ``heads``, scaled keys freed after the product. Beside logits and softmax are which logits are
    -∞, and of which rows all are. Weights are given back in the model's dtype too.
    """
    s, copied = case.shape, case.shape.element < 4
    lines = case.batch * s.query_heads * rows
    query = act("queries in fp32, 4·B·C·Hq·D", 4 * lines * s.head, 2 if copied else 1)
    keys = 4 * case.batch * present * s.head
    every = act("expanded K or V in fp32, 4·B·Hq·P·D", keys * s.query_heads)
    held = [query]
    if copied:
        held.append(act("K and V in fp32, 4·B·H·P·D", keys * heads, 2))
    if heads < s.query_heads:
        held += [every, every]
    logits = act("logits or weights in fp32, 4·B·Hq·C·P", 4 * lines * present)
    yield Moment("attention, product with keys", (*held, every, logits))
    infinite = act("which logits are -∞, B·Hq·C·P", lines * present)
    all_of = act("rows without another, B·Hq·C", lines)
    yield Moment("attention, softmax", (*held, logits, logits, infinite, all_of, act("zero", 4)))
    found: tuple[Tensor, ...] = (output(case, rows),)
    if copied:
        weights = act("weights, B·Hq·C·P·b", lines * present * s.element)
        found += (weights, act("output in fp32, 4·B·C·Hq·D", 4 * lines * s.head))
    yield Moment("attention, product with values", (*held, logits, *found))


def _eager(case: Case, rows: int, present: int) -> Iterator[Moment]:
    """Expanded keys beside logits; logits twice; the softmax in fp32.

    PyTorch's softmax reads float16 and writes fp32; bfloat16 it copies to fp32 first.
    """
    s = case.shape
    number = case.batch * s.query_heads * rows * present
    logits = act("logits, B·Hq·C·P·b", number * s.element)
    expanded = act(
        "expanded keys or values, B·Hq·P·D·b", case.batch * s.attention * present * s.element
    )
    yield Moment("attention, product with keys", (expanded, logits))
    yield Moment("attention, scaled logits", (logits, logits))
    mask = tensor("backend", "mask, C·P·b", rows * present * s.element)
    yield Moment("attention, mask", (logits, mask))
    yield from softmax(case, number)
    weights = act("weights, B·Hq·C·P·b", logits.bytes)
    yield Moment("attention, product with values", (logits, weights, expanded, output(case, rows)))


def softmax(case: Case, number: int) -> Iterator[Moment]:
    """Of so many logits, in fp32; and the weights in the model's dtype."""
    where, b = "attention, softmax", case.shape.element
    logits = act("logits, B·Hq·C·P·b", number * b)
    weights = act("weights, B·Hq·C·P·b", number * b)
    if b == 4:
        yield Moment(where, (logits, weights))
        return
    wide = act("softmax in fp32, 4·B·Hq·C·P", 4 * number)
    if case.shape.dtype == "bfloat16":
        yield Moment(where, (logits, act("logits in fp32, 4·B·Hq·C·P", 4 * number), wide))
    yield Moment(where, (logits, wide, weights))


def _efficient(case: Case, rows: int, present: int) -> Iterator[Moment]:
    """The chunk with expanded keys and values; then the prefix, whose output is put in order; both.

    Each kernel has a log-sum-exp of its rows, padded to a multiple of 32, and seed and offset.
    """
    s, found = case.shape, output(case, rows)
    heads, group = case.batch * s.query_heads, s.query_heads // s.kv_heads
    seed = act("seed and offset", 8, 2)
    if rows > 1:
        expanded = (act("expanded K and V of the chunk, B·C·Hq·D·b", found.bytes, 2),)
        lse = 4 * heads * (-(-rows // _PADDED) * _PADDED)
        yield Moment(
            "attention in the chunk",
            (*(expanded if group > 1 else ()), found, act("log-sum-exp, 4·B·Hq·C", lse), seed),
        )
    if rows == present:
        return
    folded = 4 * case.batch * s.kv_heads * (-(-group * rows // _PADDED) * _PADDED)
    before = act("log-sum-exp, 4·B·Hq·C", folded)
    if rows == 1:
        yield Moment("attention", (found, before, seed))
        return
    chunk = (found, tensor("backend", "log-sum-exp of the chunk, 4·B·Hq·C", lse))
    yield Moment("attention to the prefix", (*chunk, found, before, seed))
    kept = tensor("backend", "log-sum-exp of the prefix, 4·B·Hq·C", folded)
    number = act("of each query, 4·B·Hq·C", 4 * heads * rows)
    if s.kv_heads > 1 and group > 1:
        padded = group * rows % _PADDED > 0
        copies = (found, number) if padded else (found,)
        yield Moment("attention to the prefix, heads in order", (*chunk, found, kept, *copies))
        if padded:
            kept = number
    merged = act("merged, 4·B·C·Hq·D", 4 * heads * rows * s.head)
    yield Moment("attention, merging", (*chunk, found, kept, number, number, merged))
    if s.element < 4:
        yield Moment("attention, merged", (*chunk, found, kept, number, merged, found))


def _outputs(case: Case, rows: int) -> int:
    return case.batch * rows * case.shape.attention * case.shape.element
