"""Layer by layer: one layer's full K and V, the hidden states of all rows, and a step."""

from collections.abc import Iterator

from tidekv.formulas import layer
from tidekv.formulas.moments import Case, Moment, beside, full, resident, tensor
from tidekv.formulas.selecting import finished, layer_end


def moments(case: Case) -> Iterator[Moment]:
    """Layers end one by one, so the largest step is that of layer N-2, beside N-2 compact caches,
    or one of layer N-1, beside N-1 of them: of it only keys and values are computed for every row.
    """
    s, b = case.shape, case.shape.element
    hidden = tensor("Hidden", "hidden states, B·S·d·b", case.batch * case.prompt * s.hidden * b)
    last_row = tensor("Hidden", "hidden state of the last row, B·d·b", case.batch * s.hidden * b)
    always = (*resident(case), full(case, case.prompt), layer.window(case))
    before, last = s.layers - 2, s.layers - 1
    if before >= 0:
        step, held = f"layer {before}, ", (*always, hidden, *finished(case, before))
        for rows, end in case.spans():
            yield from beside(held, layer.step(case, rows, end), step)
        yield from beside(held, layer_end(case, before, case.prompt), step)
    step, held = f"layer {last}, ", (*always, *finished(case, last))
    for rows, end in case.spans():
        yield from beside((*held, hidden), layer.project(case, rows, end), step)
    yield from beside((*held, last_row), layer_end(case, last, case.prompt), step)
