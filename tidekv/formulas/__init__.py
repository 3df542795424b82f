"""What a prefill holds at its peak, from the sizes of the model and the prompt alone.

A formula is a list of the tensors that are alive at a moment; a schedule has a few moments at which
it can peak, and its peak is the largest of them. So each term can be set beside a recorded one
tensor by tensor, and a difference is a tensor. Bytes are those of the CUDA caching allocator, which
hands out multiples of 512; nothing is fitted.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from tidekv.formulas import layer_major, published, token_major, whole_prompt
from tidekv.formulas.attention import kernel_of
from tidekv.formulas.moments import Case, Moment, Quantised, Tensor, sizes

__all__ = ["SCHEDULES", "Case", "Moment", "Quantised", "Tensor", "kernel_of", "peak", "sizes"]

#: By name, the moments of each schedule.
SCHEDULES: Mapping[str, Callable[[Case], Iterator[Moment]]] = {
    "whole_prompt": whole_prompt.moments,
    "kv_offload": whole_prompt.moments,
    "layer_major": layer_major.moments,
    "layer_major_published": published.moments,
    "chunked": token_major.chunked,
    "online": token_major.online,
    "head_offload": token_major.head_offload,
}


def peak(case: Case) -> Moment:
    """The largest moment; of equal ones the first in time."""
    found = max(SCHEDULES[case.schedule](case), key=lambda moment: moment.total)
    if case.sharing:
        return replace(found, where=f"{found.where}, if all layers need equally many rows")
    return found
