"""One layer whose steps run on a piece of a chunk's rows at a time, in place.

See :class:`tidekv.models.tight.TightDecoder`, whose code this counts. What each step takes is freed
at its end, but for what is named as held.
"""

from collections.abc import Iterator

from tidekv.formulas import attention
from tidekv.formulas.moments import Case, Moment, Tensor, act, beside
from tidekv.formulas.scoring import observing, sums


def step(case: Case, rows: int, present: int) -> Iterator[Moment]:
    """A chunk of ``rows``, ``present`` up to its end: projections, attention, MLP.

    The chunk's queries are held until attention has its output, the rotation of its rows until they
    are complete.
    """
    s, b = case.shape, case.shape.element
    queries = act("queries, B·C·Hq·D·b", case.batch * rows * s.attention * b)
    before = (queries, *(sums(case) if present > rows else ()))
    yield from beside(before, table(case, rows))
    piece = min(case.piece, rows)
    held = (*before, rotation(case, rows))
    yield from beside(held, projections(case, piece))
    yield from beside(held, _queries(case, piece, piece))
    if rows < case.window:
        moved = case.batch * (case.window - rows) * s.attention * b
        yield Moment("the window moves", (*before, act("its queries, B·Hq·(W-C)·D·b", moved)))
    yield from beside(sums(case), _attention(case, rows, present, queries))


def _attention(case: Case, rows: int, present: int, queries: Tensor) -> Iterator[Moment]:
    """All from the chunk's queries on."""
    yield from beside((queries,), observing(case, rows, present))
    yield from beside((queries,), attention.moments(case, rows, present))
    s, b, piece = case.shape, case.shape.element, min(case.piece, rows)
    attended = attention.output(case, rows)
    joined = act("a piece's heads in a row, B·p·Hq·D·b", case.batch * piece * s.attention * b)
    in_place = attention.rows_first(case, rows, present) and (case.batch == 1 or piece == rows)
    output = act("output of a piece, B·p·d·b", case.batch * piece * s.hidden * b)
    yield Moment("output projection", (attended, *(() if in_place else (joined,)), output))
    yield from mlp(case, piece)


def project(case: Case, rows: int, end: int) -> Iterator[Moment]:
    """The last layer's part of a chunk that ends at row ``end``: keys, values and the window."""
    yield from beside(sums(case) if end > rows else (), table(case, rows))
    piece = min(case.piece, rows)
    held = (rotation(case, rows), *(sums(case) if end > rows else ()))
    yield from beside(held, projections(case, piece))
    tail = rows if case.selector == "h2o" else case.window - (case.prompt - end)
    if tail <= 0:
        return
    tail = min(tail, piece)
    yield from beside(held, _queries(case, piece, tail))
    size = case.batch * tail * case.shape.attention * case.shape.element
    queries = act("queries of a piece, B·p·Hq·D·b", size)
    held = (rotation(case, rows), *sums(case), normed(case, piece), queries)
    for start in range(0, rows, piece):
        last = min(start + piece, rows)
        yield from beside(held, observing(case, last - start, end - rows + last))


def last_row(case: Case) -> Iterator[Moment]:
    """The rest of the last layer: attention of the last row to all keys is the most of it."""
    s = case.shape
    query = act("query of the last row, B·Hq·D·b", case.batch * s.attention * s.element)
    yield from beside((normed(case, 1), query), attention.moments(case, 1, case.prompt))


def table(case: Case, rows: int) -> Iterator[Moment]:
    """Cosines and sines of a chunk's positions, and of the prompt's last, in fp32 and then not."""
    positions = (
        act("positions, 8·C", 8 * rows),
        act("the last position", 8),
        act("both, 8·(C+1)", 8 * (rows + 1)),
        act("angles, 4·(C+1)·D/2", 2 * (rows + 1) * case.shape.head),
    )
    wide = act("angles, cosines and sines in fp32, 4·(C+1)·D", 4 * (rows + 1) * case.shape.head, 4)
    yield Moment("rotation", (*positions, wide))
    if case.shape.element < 4:
        three = act(wide.what, wide.bytes, 3)
        yield Moment("rotation", (*positions, three, rotation(case, rows)))


def rotation(case: Case, rows: int) -> Tensor:
    """What stays of :func:`table`."""
    return act("cos and sin, (C+1)·D·b", (rows + 1) * case.shape.head * case.shape.element, 2)


def projections(case: Case, piece: int) -> Iterator[Moment]:
    """Norm, keys and values of a piece."""
    yield norm(case, piece)
    yield from beside((normed(case, piece),), heads(case, piece, case.shape.kv_heads, "keys"))


def _queries(case: Case, piece: int, rows: int) -> Iterator[Moment]:
    """Queries of the last rows of a piece, whose norm is there."""
    found = heads(case, rows, case.shape.query_heads, "queries")
    yield from beside((normed(case, piece),), found)


def heads(case: Case, rows: int, number: int, name: str) -> Iterator[Moment]:
    """Keys or queries on their way: normalised where the family does it, and rotated."""
    s = case.shape
    size = case.batch * rows * number * s.head * s.element
    if s.normalises_heads:
        one = act(f"{name} of a piece, B·p·H·D·b", size)
        yield from beside((one,), [norm(case, rows * number, s.head, f"norm of {name}")])
    yield Moment(
        f"rotation of {name}", (act(f"{name} of a piece in three versions, B·p·H·D·b", size, 3),)
    )


def norm(case: Case, rows: int, width: int | None = None, where: str = "norm") -> Moment:
    """An RMS norm: its fp32 copy and the product with 1/RMS, and two numbers a row.

    What is in fp32 needs no copy; the product and the one with the weights remain.
    """
    lines = case.batch * rows
    return Moment(
        where,
        (
            act("norm of a piece in fp32, 4·B·p·d", 4 * lines * (width or case.shape.hidden), 2),
            act("variance of each row, 4·B·p", 4 * lines, 2 if case.shape.element < 4 else 1),
        ),
    )


def normed(case: Case, piece: int) -> Tensor:
    """What a norm gives."""
    size = case.batch * piece * case.shape.hidden * case.shape.element
    return act("normed, B·p·d·b", size)


def mlp(case: Case, piece: int) -> Iterator[Moment]:
    """Gate and up; their product, in the gate's place, and the output.

    The norm before takes less than that before attention, beside which there is more.
    """
    held = normed(case, piece)
    wide = case.batch * piece * case.shape.mlp * case.shape.element
    yield Moment("MLP", (held, act("gate and up, B·p·d_ff·b", wide, 2)))
    product = act("product, B·p·d_ff·b", wide)
    yield Moment("MLP", (held, product, act("output of a piece, B·p·d·b", held.bytes)))
