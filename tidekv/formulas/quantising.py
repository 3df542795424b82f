"""What a ``kivi`` cache holds of a layer, and what quantising its rows takes.

See :mod:`tidekv.caches.quantised` and :mod:`tidekv.caches.packing`, whose code this counts. Of K
rows the oldest n, whole groups of g, become codes of β bits, with a scale and a zero for each group
of rows (keys) or channels (values); the newest r stay in full. Where heads keep unequal numbers all
their rows are one flat tensor, (T, D), as if of a single head, and n and r are the most there can
be (:func:`tidekv.budgets.quantised`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tidekv.budgets import quantised
from tidekv.formulas.moments import Case, Moment, Quantised, Tensor, beside, temp, tensor

#: Rows that are quantised at a time.
_ROWS = 1024


@dataclass(frozen=True)
class _Rows:
    """Of each of some heads: rows that are quantised, and the newest."""

    heads: int
    old: int
    newest: int


def packed(case: Case, kept: int) -> tuple[Tensor, ...]:
    """What a layer holds; nothing: no row is quantised."""
    how, rows = case.quantised, _rows(case, kept)
    if how is None or rows is None:
        return ()
    found = (*_codes("KV_res/compact", case, how, rows.heads, rows.old, 2), _newest(case, rows, 2))
    if not case.ragged:
        return found
    heads = 8 * case.batch * case.shape.kv_heads
    return (*found, tensor("KV_res/compact", "quantised rows of each head, 8·B·Hkv", heads))


def quantising(case: Case, kept: int) -> Iterator[Moment]:
    """A layer's rows are quantised, keys before values; beside the rows themselves."""
    how, rows = case.quantised, _rows(case, kept)
    if how is None or rows is None:
        return
    if case.ragged:
        yield from _flat(case, how, rows, kept)
        return
    keys = _codes("KV_res/compact", case, how, rows.heads, rows.old, 1)
    yield from _both(case, how, rows)
    yield Moment("quantised", (*keys, *keys, _newest(case, rows, 1)))


def _both(case: Case, how: Quantised, rows: _Rows) -> Iterator[Moment]:
    """Keys, whose groups run over rows, and then values beside them."""
    step = max(_ROWS // how.group, 1) * how.group
    yield from _blocks(case, how, rows, step)
    keys = _codes("KV_res/compact", case, how, rows.heads, rows.old, 1)
    yield from beside(keys, _blocks(case, how, rows, _ROWS))


def _flat(case: Case, how: Quantised, rows: _Rows, kept: int) -> Iterator[Moment]:
    """To which head each of T rows belongs, its place there, and whether it is old; copies of the
    old rows, which are quantised; the newest."""
    heads = case.batch * case.shape.kv_heads
    total = heads * kept
    of_each = temp("quantised rows of each head, 8·B·Hkv", 8 * heads)
    yield Moment("dividing rows", (of_each, temp("heads and places of rows, 8·T", 8 * total, 4)))
    older = temp("whether each row is quantised, T", total)
    at = temp("positions of those that are, 8·n", 8 * rows.old)
    size = rows.old * case.shape.head * case.shape.element
    copied = temp("old keys or values, n·D·b", size)
    yield from beside((of_each, older, at, copied), _both(case, how, rows))
    both = _codes("KV_res/compact", case, how, rows.heads, rows.old, 2)
    new = temp("positions of the newest, 8·r", 8 * rows.newest)
    yield Moment("quantised", (*both, of_each, older, new, at))
    yield Moment("quantised", (*both, of_each, older, new, _newest(case, rows, 2)))


def _blocks(case: Case, how: Quantised, layer: _Rows, step: int) -> Iterator[Moment]:
    """Block by block numbers and codes in fp32, codes as bytes, shifted and packed; all joined."""
    s, old = case.shape, layer.old
    lines = layer.heads * s.head
    blocks = [min(step, old - start) for start in range(0, old, step)]
    done: tuple[Tensor, ...] = ()
    for number, rows in enumerate(blocks):
        if number >= len(blocks) - 2:  # all others are as large, with less before them
            one = lines * rows
            groups = one // how.group
            # In fp32 the numbers are there, as are scale and zero.
            copied = s.element < 4
            yield Moment(
                "quantising",
                (
                    *done,
                    temp("numbers and codes in fp32, 4·B·Hkv·n·D", 4 * one, 2 if copied else 1),
                    temp("extremes and steps in fp32, 4·B·Hkv·n·D/g", 4 * groups, 3),
                    *((_scales("Temp", s.element * groups),) if copied else ()),
                    temp("codes as bytes, B·Hkv·n·D", one, 2),
                    temp("packed codes, B·Hkv·n·D·β/8", one * how.bits // 8),
                ),
            )
        done += _codes("Temp", case, how, layer.heads, rows, 1)
    yield Moment("joining", (*done, *_codes("KV_res/compact", case, how, layer.heads, old, 1)))


def _codes(
    component: str, case: Case, how: Quantised, heads: int, rows: int, parts: int
) -> tuple[Tensor, ...]:
    """Codes, scales and zeros of keys or values (one part), or both."""
    s = case.shape
    numbers = heads * rows * s.head
    scale = numbers // how.group * s.element
    return (
        tensor(component, "codes, B·Hkv·n·D·β/8", numbers * how.bits // 8, parts),
        _scales(component, scale, parts),
    )


def _scales(component: str, size: int, parts: int = 1) -> Tensor:
    return tensor(component, "scales and zeros, B·Hkv·n·D/g·b", size, 2 * parts)


def _newest(case: Case, rows: _Rows, parts: int) -> Tensor:
    size = rows.heads * rows.newest * case.shape.head * case.shape.element
    return tensor("KV_res/compact", "newest K and V, B·Hkv·r·D·b", size, parts)


def _rows(case: Case, kept: int) -> _Rows | None:
    """Whole groups are quantised, until at most ``residual`` rows are left; None: none are."""
    how, heads = case.quantised, case.batch * case.shape.kv_heads
    if how is None:
        return None
    if case.ragged:
        old, newest = quantised(
            heads * kept, heads, least=case.fewest, residual=how.residual, group=how.group
        )
        return _Rows(1, old, newest) if old else None
    old = -(-max(kept - how.residual, 0) // how.group) * how.group
    return _Rows(heads, old, kept - old) if old else None
