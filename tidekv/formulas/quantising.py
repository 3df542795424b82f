"""What a ``kivi`` cache holds of a layer, and what quantising its rows takes.

See :mod:`tidekv.caches.quantised` and :mod:`tidekv.caches.packing`, whose code this counts. Of K
rows the oldest n, whole groups of g, become codes of β bits, with a scale and a zero for each group
of rows (keys) or channels (values); the newest r stay in full.
"""

from collections.abc import Iterator

from tidekv.formulas.moments import Case, Moment, Quantised, Tensor, beside, temp, tensor

#: Rows that are quantised at a time.
_ROWS = 1024


def packed(case: Case, kept: int) -> tuple[Tensor, ...]:
    """What a layer holds; nothing: no row is quantised."""
    how = case.quantised
    old = _old(case, kept)
    if how is None or old == 0:
        return ()
    return (*_codes("KV_res/compact", case, how, old, 2), _newest(case, kept - old, 2))


def quantising(case: Case, kept: int) -> Iterator[Moment]:
    """A layer's rows are quantised, keys before values; beside the rows themselves."""
    how = case.quantised
    old = _old(case, kept)
    if how is None or old == 0:
        return
    keys = _codes("KV_res/compact", case, how, old, 1)
    step = max(_ROWS // how.group, 1) * how.group
    yield from _blocks(case, how, old, step)
    yield from beside(keys, _blocks(case, how, old, _ROWS))
    both = _codes("KV_res/compact", case, how, old, 2)
    yield Moment("quantised", (*both, _newest(case, kept - old, 1)))


def _blocks(case: Case, how: Quantised, old: int, step: int) -> Iterator[Moment]:
    """Block by block numbers and codes in fp32, codes as bytes, shifted and packed; all joined."""
    s = case.shape
    lines = case.batch * s.kv_heads * s.head
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
        done += _codes("Temp", case, how, rows, 1)
    yield Moment("joining", (*done, *_codes("KV_res/compact", case, how, old, 1)))


def _codes(component: str, case: Case, how: Quantised, rows: int, parts: int) -> tuple[Tensor, ...]:
    """Codes, scales and zeros of keys or values (one part), or both."""
    s = case.shape
    numbers = case.batch * s.kv_heads * rows * s.head
    scale = numbers // how.group * s.element
    return (
        tensor(component, "codes, B·Hkv·n·D·β/8", numbers * how.bits // 8, parts),
        _scales(component, scale, parts),
    )


def _scales(component: str, size: int, parts: int = 1) -> Tensor:
    return tensor(component, "scales and zeros, B·Hkv·n·D/g·b", size, 2 * parts)


def _newest(case: Case, rows: int, parts: int) -> Tensor:
    size = case.batch * case.shape.kv_heads * rows * case.shape.head * case.shape.element
    return tensor("KV_res/compact", "newest K and V, B·Hkv·r·D·b", size, parts)


def _old(case: Case, kept: int) -> int:
    """Rows that are quantised: whole groups, until at most ``residual`` are left."""
    how = case.quantised
    if how is None or kept <= how.residual:
        return 0
    return -(-(kept - how.residual) // how.group) * how.group
