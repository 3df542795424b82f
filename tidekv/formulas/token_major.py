"""Chunk by chunk through all layers: rows of every layer, a chunk's hidden states, and a step."""

from collections.abc import Iterator

from tidekv.formulas import layer
from tidekv.formulas.moments import Case, Moment, Tensor, beside, full, resident, tensor
from tidekv.formulas.selecting import layer_end


def chunked(case: Case) -> Iterator[Moment]:
    """Every layer's K and V; at the end of the first one, when all others are full still, its
    choice."""
    s = case.shape
    held = (*resident(case), full(case, case.prompt, s.layers), *_windows(case))
    for number, (rows, end) in enumerate(case.spans()):
        step = f"chunk {number}, "
        yield from beside((*held, _hidden(case, rows)), layer.step(case, rows, end), step)
    yield from beside((*held, _hidden(case, 1)), layer_end(case, 0, case.prompt), "layer 0, ")


def online(case: Case) -> Iterator[Moment]:
    """In every layer the kept rows and a chunk; a layer is cut back after each chunk."""
    kept = case.kept[0]
    most = min(kept + case.chunk, case.prompt)
    held = (*resident(case), full(case, most, case.shape.layers), *_windows(case))
    present = 0
    for number, (rows, _) in enumerate(case.spans()):
        step, present = f"chunk {number}, ", present + rows
        states = (*held, _hidden(case, rows))
        yield from beside(states, layer.step(case, rows, present), step)
        if present > kept:
            yield from beside(states, layer_end(case, 0, present), step)
            present = kept


def head_offload(case: Case) -> Iterator[Moment]:
    """K and V on the host; on the device those of one KV head, whose attention is written into
    that of all heads. With a selector each layer visits at the end."""
    held = (*resident(case), *_windows(case))
    for number, (rows, end) in enumerate(case.spans()):
        step = f"chunk {number}, "
        states = (*held, _hidden(case, rows))
        yield from beside(states, layer.step(case, rows, end), step)
    if case.selector is not None:
        held = (*held, _hidden(case, 1), full(case, case.prompt))
        yield from beside(held, layer_end(case, 0, case.prompt), "layer 0, ")


def _windows(case: Case) -> Iterator[Tensor]:
    one = layer.window(case)
    yield Tensor(one.component, one.what, one.bytes, case.shape.layers)


def _hidden(case: Case, rows: int) -> Tensor:
    size = case.batch * rows * case.shape.hidden * case.shape.element
    return tensor("Hidden", "hidden states of the chunk, B·C·d·b", size)
