"""Chunk by chunk through all layers: rows of every layer, a chunk's hidden states, and a step."""

from collections.abc import Iterator

from tidekv.formulas import layer
from tidekv.formulas.moments import Case, Moment, Tensor, beside, full, resident, tensor
from tidekv.formulas.quantising import quantising
from tidekv.formulas.scoring import sums
from tidekv.formulas.selecting import layer_end, observed, rows_kept


def chunked(case: Case) -> Iterator[Moment]:
    """Every layer's K and V; at the end of the first one, when all others are full still, its
    choice."""
    own, others = full(case, case.prompt), full(case, case.prompt, case.shape.layers - 1)
    held = (*resident(case), others, *_observed(case))
    yield from _chunks(case, (*held, own))
    yield from beside((*held, _hidden(case, 1)), layer_end(case, 0, case.prompt, own), "layer 0, ")


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
    held = (*resident(case), *_observed(case))
    yield from _chunks(case, held)
    end = layer_end(case, 0, case.prompt, full(case, case.prompt))
    yield from beside((*held, _hidden(case, 1)), end, "layer 0, ")


def _chunks(case: Case, held: tuple[Tensor, ...]) -> Iterator[Moment]:
    for number, (rows, end) in enumerate(case.spans()):
        states = (*held, _hidden(case, rows))
        yield from beside(states, layer.step(case, rows, end), f"chunk {number}, ")


def _observed(case: Case) -> Iterator[Tensor]:
    """What every layer holds for its end."""
    for one in observed(case):
        yield Tensor(one.component, one.what, one.bytes, case.shape.layers)
    yield from sums(case, case.shape.layers - 1)  # of the others


def _hidden(case: Case, rows: int) -> Tensor:
    size = case.batch * rows * case.shape.hidden * case.shape.element
    return tensor("Hidden", "hidden states of the chunk, B·C·d·b", size)
