"""Key norms (Devoto et al. 2024, arXiv 2406.11430): rows whose keys are short."""

from dataclasses import dataclass

import torch

from tidekv.scoring import keep_best
from tidekv.selectors.base import LayerEnd, Selector


@dataclass(frozen=True)
class Knorm(Selector):
    """Keep the rows whose keys have the lowest L2 norm; reads no query.

    The paper leaves the first two layers whole in some runs; here every layer has the budget.
    """

    def select(self, layer: LayerEnd, rows: int, scoring: str) -> torch.Tensor:
        """See :meth:`tidekv.selectors.base.Selector.select`."""
        dtype = torch.promote_types(layer.keys.dtype, torch.float32)
        norms = torch.linalg.vector_norm(layer.keys, dim=-1, dtype=dtype)
        return keep_best(norms.neg_(), rows=rows, length=layer.keys.shape[2])
