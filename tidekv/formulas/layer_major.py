"""Layer by layer: one layer's full K and V, the hidden states of all rows, and a step."""

from collections.abc import Iterator

from tidekv.formulas import layer
from tidekv.formulas.moments import Case, Moment, at_head, beside, full, resident, temp, tensor
from tidekv.formulas.selecting import ends, finished, layer_end, observed, remembered


def moments(case: Case) -> Iterator[Moment]:
    """Layers end one by one, so the largest step is that of layer N-2, beside N-2 compact caches,
    or one of layer N-1, beside N-1 of them: of it only keys and values are computed for every row.
    """
    s, b = case.shape, case.shape.element
    hidden = tensor("Hidden", "hidden states, B·S·d·b", case.batch * case.prompt * s.hidden * b)
    if "host_bridge" in case.placed:
        slot = case.batch * case.chunk * s.hidden * b
        slots = min(len(case.spans()), 2)
        hidden = tensor("Hidden", "hidden states of a chunk, B·C·d·b", slot, slots)
    last_row = tensor("Hidden", "hidden state of the last row, B·d·b", case.batch * s.hidden * b)
    own, before, last = full(case, case.prompt), s.layers - 2, s.layers - 1
    always = (*resident(case), *observed(case))
    if before >= 0:
        step = f"layer {before}, "
        held = (*always, hidden, *finished(case, before), *remembered(case, before))
        for rows, end in case.spans():
            yield from beside((*held, own), layer.step(case, rows, end), step)
        for index in ends(case, before):
            held = (*always, hidden, *finished(case, index), *remembered(case, index))
            yield from beside(held, layer_end(case, index, case.prompt, own), f"layer {index}, ")
    step, held = f"layer {last}, ", (*always, *finished(case, last), *remembered(case, last))
    for rows, end in case.spans():
        yield from beside((*held, own, hidden), layer.project(case, rows, end), step)
    yield from beside((*held, own, last_row), layer.last_row(case), step)
    yield from beside((*held, last_row), layer_end(case, last, case.prompt, own), step)
    if case.placed & {"stream_weights", "host_embeddings"}:
        logits = temp("logits, B·V·b", case.batch * s.vocabulary * b)
        normed = temp("normed, B·d·b", case.batch * s.hidden * b)
        held = (*at_head(case), last_row, *finished(case, s.layers), *remembered(case, s.layers))
        yield Moment("the head", (*held, normed, logits))
