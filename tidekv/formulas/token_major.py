"""Chunk by chunk through all layers: rows of every layer, a chunk's hidden states, and a step."""

from collections.abc import Iterator

from tidekv.formulas import layer
from tidekv.formulas.moments import Case, Moment, Tensor, beside, full, resident, tensor
from tidekv.formulas.quantising import quantising
from tidekv.formulas.scoring import sums
from tidekv.formulas.selecting import finished, layer_end, observed, remembered, rows_kept


def chunked(case: Case) -> Iterator[Moment]:
    """Every layer's K and V; at a layer's end, when the next ones are full still, its choice."""
    layers, own = case.shape.layers, full(case, case.prompt)
    yield from _chunks(case, (*resident(case), full(case, case.prompt, layers), *_observed(case)))
    for index in range(layers):
        others = full(case, case.prompt, layers - 1 - index)
        yield from beside(
            (others, *_at_end(case, index)),
            layer_end(case, index, case.prompt, own),
            f"layer {index}, ",
        )


def _at_end(case: Case, index: int) -> Iterator[Tensor]:
    """What is there at a layer's end whatever the layer itself has."""
    yield from resident(case)
    yield _hidden(case, 1)
    yield from finished(case, index)
    yield from remembered(case, index)
    yield from _observed(case, case.shape.layers - index)


def online(case: Case) -> Iterator[Moment]:
    """In every layer the kept rows and a chunk; a layer is cut back after each chunk. In the end
    the kept rows are quantised, of the first layer beside those of all others."""
    kept, present = case.kept[0], 0
    own, *others = (full(case, min(rows + case.chunk, case.prompt)) for rows in case.kept)
    held = (*resident(case), *others, *_observed(case))
    for number, (rows, _) in enumerate(case.spans()):
        step, present = f"chunk {number}, ", present + rows
        states = (*held, _hidden(case, rows))
        yield from beside((*states, own), layer.step(case, rows, present), step)
        if present > kept:
            yield from beside(states, layer_end(case, 0, present, own, final=False), step)
            present = kept
    copied = rows_kept if kept < case.prompt else full  # what kept all still is what it was
    others = [copied(case, rows) for rows in case.kept[1:]]
    held = (*resident(case), *_observed(case), rows_kept(case, kept), *others)
    yield from beside((*held, _hidden(case, 1)), quantising(case, kept), "layer 0, ")


def head_offload(case: Case) -> Iterator[Moment]:
    """K and V on the host; on the device those of one KV head, whose attention is written into
    that of all heads. With a selector each layer visits at the end."""
    yield from _chunks(case, (*resident(case), *_observed(case)))
    for index in range(case.shape.layers):
        end = layer_end(case, index, case.prompt, full(case, case.prompt))
        yield from beside(_at_end(case, index), end, f"layer {index}, ")


def _chunks(case: Case, held: tuple[Tensor, ...]) -> Iterator[Moment]:
    for number, (rows, end) in enumerate(case.spans()):
        states = (*held, _hidden(case, rows))
        yield from beside(states, layer.step(case, rows, end), f"chunk {number}, ")


def _observed(case: Case, layers: int | None = None) -> Iterator[Tensor]:
    """What every layer holds for its end, or so many."""
    layers = case.shape.layers if layers is None else layers
    for one in observed(case):
        yield Tensor(one.component, one.what, one.bytes, layers)
    yield from sums(case, layers - 1)  # of the others


def _hidden(case: Case, rows: int) -> Tensor:
    size = case.batch * rows * case.shape.hidden * case.shape.element
    return tensor("Hidden", "hidden states of the chunk, B·C·d·b", size)
