"""TideKV as published: stock modules on whole chunks, K and V of a layer in three versions.

See :mod:`tidekv.schedules.layer_major_published` and :mod:`tidekv.models.published`, whose code
this counts, and transformers' LlamaAttention and LlamaMLP.
"""

from collections import Counter
from collections.abc import Iterator

from tidekv.formulas import layer
from tidekv.formulas.attention import flash, math, softmax
from tidekv.formulas.moments import Case, Moment, Tensor, act, beside, full, resident, tensor
from tidekv.formulas.scoring import observing, sums
from tidekv.formulas.selecting import ends, finished, layer_end, observed, remembered

#: Columns to whose multiple the memory-efficient kernel pads a mask.
_ALIGNED = 8


def moments(case: Case) -> Iterator[Moment]:
    """Those of the last layer, which runs in full beside N-1 compact caches."""
    last, spans = case.shape.layers - 1, case.spans()
    always = (*resident(case), *observed(case))
    caches = (*finished(case, last), *remembered(case, last))
    step = f"layer {last}, "
    for number, (rows, end) in enumerate(spans):
        others = _hidden(case, [*spans[:number], *spans[number + 1 :]])
        held = (*always, *caches, *others, *_pieces(case, spans[:number]))
        yield from beside(held, _chunk(case, rows, end), step)
    own = full(case, case.prompt)
    always += (*_hidden(case, spans), *_pieces(case, spans), *_newest(case, spans[-1][0]))
    for index in ends(case, last):
        held = (*always, *finished(case, index), *remembered(case, index))
        yield from beside(held, layer_end(case, index, case.prompt, own), f"layer {index}, ")


def _hidden(case: Case, spans: list[tuple[int, int]]) -> Iterator[Tensor]:
    """Hidden states of chunks, one tensor each."""
    row = case.batch * case.shape.hidden * case.shape.element
    for rows, count in Counter(rows for rows, _ in spans).items():
        yield tensor("Hidden", "hidden states of a chunk, B·C·d·b", row * rows, count)


def _pieces(case: Case, spans: list[tuple[int, int]]) -> Iterator[Tensor]:
    """K and V of chunks, two tensors each."""
    for rows, count in Counter(rows for rows, _ in spans).items():
        size = case.batch * rows * case.shape.kv_heads * case.shape.head * case.shape.element
        yield tensor("KV_res/full", "K and V of a chunk, B·Hkv·C·D·b", size, 2 * count)


def _newest(case: Case, rows: int) -> Iterator[Tensor]:
    """K and V as projection and rotation gave them; rows of one head need no copy."""
    if case.shape.kv_heads > 1 and rows > 1:
        yield act("K and V of the newest chunk, B·Hkv·C·D·b", _key(case, rows), 2)


def _key(case: Case, rows: int) -> int:
    return case.batch * rows * case.shape.kv_heads * case.shape.head * case.shape.element


def _chunk(case: Case, rows: int, end: int) -> Iterator[Moment]:
    """A chunk, whose input is held until attention was added to it."""
    s, b = case.shape, case.shape.element
    size = case.batch * rows * s.hidden * b
    given = tensor("Hidden", "hidden states of a chunk, B·C·d·b", size)
    mask: tuple[Tensor, ...] = ()
    if case.kernel != "flash":
        mask = (tensor("backend", "mask, C·P·b", rows * end * b),)
    before = tuple(sums(case)) if end > rows else ()
    yield from beside((given, *mask, *before), layer.table(case, rows))
    held = (*mask, layer.rotation(case, rows))
    yield from beside((*held, *before, given), [layer.norm(case, rows)])
    states = act("states of a chunk, B·C·d·b", size)
    yield from beside((*held, *before, given, states), _projections(case, rows))
    held = (*held, *sums(case))
    stored = (*_pieces(case, [(rows, end)]), *_newest(case, rows), full(case, end))
    query = act("queries, B·C·Hq·D·b", case.batch * rows * s.attention * b)
    seen = (*held, *stored, given, states, query)
    yield from beside(seen, observing(case, rows, end))
    yield from beside(seen, _attention(case, rows, end))
    yield from beside((*held, *stored, states), _mlp(case, rows))


def _projections(case: Case, rows: int) -> Iterator[Moment]:
    """``apply_rotary_pos_emb`` has queries (and keys) in four versions, as of a whole prompt."""
    s, b = case.shape, case.shape.element
    query = act("queries in some version, B·C·Hq·D·b", case.batch * rows * s.attention * b)
    key = act("keys or values in some version, B·C·Hkv·D·b", _key(case, rows))
    if s.normalises_heads:
        yield from beside(
            (query,), [layer.norm(case, rows * s.query_heads, s.head, "norm of queries")]
        )
        yield from beside(
            (query, key), [layer.norm(case, rows * s.kv_heads, s.head, "norm of keys")]
        )
    yield Moment("rotation of queries", (*[query] * 4, *[key] * 2))
    yield Moment("rotation of keys", (*[query] * 2, *[key] * 5))


def _attention(case: Case, rows: int, end: int) -> Iterator[Moment]:
    """The kernel, and what follows it. Without FlashAttention heads are expanded (one: a view)."""
    s, b = case.shape, case.shape.element
    attended = act("attention's output, B·C·Hq·D·b", case.batch * rows * s.attention * b)
    size = case.batch * s.attention * end * b
    expanded = act("expanded K and V, B·Hq·P·D·b", size, 2)
    held = (expanded,) if s.query_heads > s.kv_heads > 1 else ()
    if case.kernel == "flash":
        yield flash(case, rows, end)
    elif case.kernel == "efficient":
        padded = -(-end // _ALIGNED) * _ALIGNED
        mask = act("the mask, padded, C·P·b", rows * padded * b)
        found = (attended, *((mask,) if padded > end else ()), act("seed and offset", 8, 2))
        yield Moment("attention", (*held, *found))
    elif case.kernel == "math":
        yield from beside(held, math(case, rows, end, s.query_heads))
    else:
        number = case.batch * s.query_heads * rows * end
        logits = act("logits, B·Hq·C·P·b", number * b)
        yield Moment("attention, scaled logits", (*held, logits, logits))
        yield from beside(held, softmax(case, number))
        yield Moment("attention, product with values", (*held, logits, attended, attended))
    output = act("output of a chunk, B·C·d·b", case.batch * rows * s.hidden * b)
    yield Moment("output projection", (attended, output))


def _mlp(case: Case, rows: int) -> Iterator[Moment]:
    """With the residual: the norm; ``act(gate)·up`` and its output beside the MLP's input."""
    s, b = case.shape, case.shape.element
    yield layer.norm(case, rows, where="norm of the MLP")
    states = act("states of a chunk, B·C·d·b", case.batch * rows * s.hidden * b)
    wide = act("gate, up and product, B·C·d_ff·b", case.batch * rows * s.mlp * b, 3)
    yield Moment("the product in its MLP", (states, wide))
    product = act("product, B·C·d_ff·b", case.batch * rows * s.mlp * b)
    yield Moment("the output of its MLP", (states, product, states))
