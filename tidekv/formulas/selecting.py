"""What a layer's end takes: scores, the choice of rows, and their copies.

See :mod:`tidekv.scoring` and :mod:`tidekv.caches`, whose code this counts.
"""

from collections.abc import Iterator

from tidekv.formulas.moments import Case, Moment, Tensor, temp, tensor


def layer_end(case: Case, layer: int, present: int) -> Iterator[Moment]:
    """Scoring ``present`` rows, and the copies of those that are kept."""
    if case.selector is None:
        return
    kept = min(case.kept[layer], present)
    if kept < present:
        yield from _scoring(case, present)
    indices = temp(
        "positions of the kept rows, 8·B·Hkv·K", 8 * case.batch * case.shape.kv_heads * kept
    )
    yield Moment("compression", (indices, rows_of(case, kept)))


def rows_of(case: Case, rows: int) -> Tensor:
    """Keys and values that a layer keeps, in full."""
    s = case.shape
    size = case.batch * s.kv_heads * rows * s.head * s.element
    return tensor("KV_res/compact", "kept K and V of a layer, B·Hkv·K·D·b", size, 2)


def finished(case: Case, layers: int) -> Iterator[Tensor]:
    """What the first ``layers`` hold."""
    for rows in dict.fromkeys(case.kept[:layers]):
        one = rows_of(case, rows)
        yield Tensor(one.component, one.what, one.bytes, 2 * list(case.kept[:layers]).count(rows))


def _scoring(case: Case, present: int) -> Iterator[Moment]:
    """Both passes over keys: O(B·Hq·(W·b_s + W²) + B·Hkv·(S + b_s·D)), all in fp32.

    In the first the logits of the window's own keys stay until those of the first block are there;
    in the second a block's weights are summed up over the window, beside what pooling needs of the
    block before.
    """
    s = case.shape
    heads, prefix = case.batch * s.query_heads, max(present - case.window, 0)
    held = (
        temp("scores, 4·B·Hkv·(S-W)", 4 * case.batch * s.kv_heads * prefix),
        temp("scaled queries, 4·B·Hq·W·D", 4 * heads * case.window * s.head),
        temp("maximum and sum of each query, 4·B·Hq·W", 4 * heads * case.window, 2),
    )
    own = temp("the window's own logits, 4·B·Hq·W²", 4 * heads * case.window**2)
    yield Moment("scoring", (*held, own, *_block(case, min(case.block, prefix))))
    before = temp(
        "sums of neighbours, 8·B·Hkv·⌊kernel/2⌋", 8 * case.batch * s.kv_heads * (case.pooled // 2)
    )
    ends = [*range(case.block, prefix, case.block), prefix]
    for number in dict.fromkeys((0, 1, len(ends) - 1)):
        if number < len(ends):
            rows = ends[number] - number * case.block
            around = (*held, *((before,) if number else ()))
            logits, *keys = _block(case, rows)
            yield Moment("scoring", (*around, logits, *keys))
            yield Moment(
                "scoring",
                (*around, logits, temp("sums over the window, 4·B·Hq·b_s", 4 * heads * rows)),
            )


def _block(case: Case, rows: int) -> Iterator[Tensor]:
    s = case.shape
    logits = 4 * case.batch * s.query_heads * case.window * rows
    yield temp("logits of a block, 4·B·Hq·W·b_s", logits)
    if s.element < 4:
        size = 4 * case.batch * s.kv_heads * rows * s.head
        yield temp("keys of a block in fp32, 4·B·Hkv·b_s·D", size)
