"""What a layer's end takes: scores, the choice of rows, and their copies.

See :mod:`tidekv.schedules.base` and :mod:`tidekv.caches`, whose code this counts.
"""

from collections import Counter
from collections.abc import Iterator

from tidekv.formulas.moments import Case, Moment, Tensor, beside, temp, tensor
from tidekv.formulas.quantising import packed, quantising
from tidekv.formulas.scoring import scoring

#: Selectors that choose the same rows for all heads, whose positions they hold once.
_SHARED = frozenset({"tova"})


def layer_end(
    case: Case, layer: int, present: int, own: Tensor, *, final: bool = True
) -> Iterator[Moment]:
    """Scoring ``present`` rows, the copies of those that are kept, and quantising them.

    Args:
        own: where the layer's K and V are; without a selector they are what is kept.
        final: whether no more rows come, and those that are kept are quantised.
    """
    kept = min(case.after(layer + 1)[layer], present)
    if case.selector is None:
        if not case.by_head:  # there they are on the host
            yield from beside((rows_kept(case, kept),), quantising(case, kept))
        return
    yield from beside((own,), _selected(case, present, kept, final))
    if case.sharing:
        yield from beside((own,), _shrinking(case, layer))


def _shrinking(case: Case, layer: int) -> Iterator[Moment]:
    """The first of the finished layers to give up rows: what it keeps is copied, others are as they
    were. None has more afterwards, nor has the new layer."""
    lines = case.batch * case.shape.kv_heads
    before, after = case.after(layer), case.after(layer + 1)
    first = next((one for one in range(layer) if after[one] < before[one]), None)
    if first is None:
        return
    rows, new = after[first], after[layer]
    found = (
        temp("positions of the kept rows, 8·B·Hkv·K", 8 * lines * new),
        temp("positions of the kept rows, 8·B·Hkv·K", 8 * lines * rows),
        temp("scores of the kept rows, 4·B·Hkv·(K-W)", 4 * lines * (new - case.window)),
        temp("scores of the kept rows, 4·B·Hkv·(K-W)", 4 * lines * (rows - case.window)),
    )
    yield Moment("earlier layers' rows", (*found, rows_kept(case, rows)))


def _selected(case: Case, present: int, kept: int, final: bool) -> Iterator[Moment]:
    if kept < present or case.sharing:
        yield from scoring(case, present, kept)
    heads = case.batch * case.shape.kv_heads
    if case.selector in _SHARED and kept < present:
        heads = case.batch
    found = [temp("positions of the kept rows, 8·B·Hkv·K", 8 * heads * kept)]
    if case.ragged:
        found.append(temp("the head of each kept row, 8·B·Hkv·K", 8 * heads * kept))
        found.append(temp("heads, and rows of each, 8·B·Hkv", 8 * heads, 2))
    if case.sharing:
        size = 4 * heads * (kept - case.window)
        found.append(temp("scores of the kept rows, 4·B·Hkv·(K-W)", size))
    yield Moment("compression", (*found, rows_kept(case, kept)))
    if not final:
        return
    held = (found[0], rows_kept(case, kept), *(_numbers(case) if case.ragged else ()))
    yield from beside(held, quantising(case, kept))


def ends(case: Case, last: int) -> range:
    """The layers up to ``last`` at whose ends a prefill can peak.

    Where finished layers hold what they held it is the last one. Where they give rows back the
    first ones keep most, and most of those are copied when others come.
    """
    return range(last + 1) if case.sharing else range(last, last + 1)


def observed(case: Case) -> Iterator[Tensor]:
    """What a layer that runs holds for its end."""
    s = case.shape
    size = case.batch * case.window * s.attention * s.element
    yield temp("queries of the window, B·Hq·W·D·b", size)


def remembered(case: Case, layers: int) -> Iterator[Tensor]:
    """What a selector holds of ``layers`` that ended: ChunkKV the rows of the last, CAKE scores."""
    if case.selector == "chunkkv" and layers:
        heads = case.batch * case.shape.kv_heads
        yield temp("positions of the rows before, 8·B·Hkv·K", 8 * heads * case.kept[0])

    if case.sharing:
        lines = case.batch * case.shape.kv_heads
        for rows, count in Counter(case.after(layers)).items():
            size = 4 * lines * (rows - case.window)
            yield temp("scores of the kept rows, 4·B·Hkv·(K-W)", size, count)


def finished(case: Case, layers: int) -> Iterator[Tensor]:
    """What the first ``layers`` hold on the device."""
    offloaded = case.schedule == "kv_offload" and case.selector is None and case.quantised is None
    if offloaded or "park_caches" in case.placed:
        return
    for rows, count in Counter(case.after(layers)).items():
        held = packed(case, rows) or (rows_kept(case, rows),)
        for one in (*held, *(_numbers(case) if case.ragged else ())):
            yield Tensor(one.component, one.what, one.bytes, one.count * count)


def _numbers(case: Case) -> Iterator[Tensor]:
    """What a layer whose heads keep unequal numbers of rows knows of them."""
    heads = 8 * case.batch * case.shape.kv_heads
    yield tensor("KV_res/compact", "rows of each head, 8·B·Hkv", heads)
    yield tensor("KV_res/compact", "prompts, 8·B", 8 * case.batch)


def rows_kept(case: Case, rows: int) -> Tensor:
    """Keys and values that a layer keeps, in full."""
    s = case.shape
    size = case.batch * s.kv_heads * rows * s.head * s.element
    return tensor("KV_res/compact", "kept K and V of a layer, B·Hkv·K·D·b", size, 2)
