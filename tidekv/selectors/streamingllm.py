"""StreamingLLM (Xiao et al. 2023, arXiv 2309.17453): the first rows and the last."""

from dataclasses import dataclass

import torch

from tidekv.errors import InfeasibleError
from tidekv.selectors.base import LayerEnd, Selector
from tidekv.selectors.recent import ends


@dataclass(frozen=True)
class StreamingLLM(Selector):
    """Keep attention sinks and the last rows.

    Rows keep the positions they had in the prompt, as comparisons of cache compression have it; the
    paper's positions are those in the cache, for streams longer than the model's context.

    Attributes:
        sinks: rows kept at the start of the prompt.
    """

    sinks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks < 0:
            raise InfeasibleError(f"StreamingLLM needs sinks ≥ 0, not {self.sinks}.")

    @property
    def mandatory(self) -> int:
        """The sinks."""
        return self.sinks

    def select(self, layer: LayerEnd, rows: int, scoring: str) -> torch.Tensor:
        """See :meth:`tidekv.selectors.base.Selector.select`."""
        return ends(layer.keys, rows, self.sinks)
