"""KeyDiff (Park et al. 2025, arXiv 2504.15364): rows whose keys point elsewhere."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tidekv.errors import InfeasibleError
from tidekv.scoring import keep_best
from tidekv.selectors.base import LayerEnd, Selector


@dataclass(frozen=True)
class KeyDiff(Selector):
    """Keep the rows whose keys differ most in direction from the mean one; reads no query.

    The score of a key, rotated, is -cos(k, anchor), where the anchor is the mean of all k / ‖k‖ of
    its KV head. The paper evicts after each block of a prompt that is read block by block, which is
    a matter of the schedule; its variant with a sliding window is ``recent``.

    Attributes:
        recent: rows kept at the end of the prompt.
        block_size: keys that are normalised at a time.
    """

    recent: int = 0
    block_size: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recent < 0 or self.block_size < 1:
            raise InfeasibleError(
                "KeyDiff needs recent ≥ 0 and block_size ≥ 1, not "
                f"recent={self.recent}, block_size={self.block_size}."
            )

    @property
    def mandatory(self) -> int:
        """The recent rows."""
        return self.recent

    def select(self, layer: LayerEnd, rows: int, scoring: str) -> torch.Tensor:
        """See :meth:`tidekv.selectors.base.Selector.select`."""
        length = layer.keys.shape[2]
        dtype = torch.promote_types(layer.keys.dtype, torch.float32)
        anchor = layer.keys.new_zeros(*layer.keys.shape[:2], 1, layer.keys.shape[3], dtype=dtype)
        for block in layer.keys.split(self.block_size, dim=2):
            anchor += F.normalize(block.to(dtype), dim=-1).sum(2, keepdim=True)
        scores = layer.keys.new_empty(*layer.keys.shape[:3], dtype=dtype)
        parts = zip(
            scores.split(self.block_size, dim=2),
            layer.keys.split(self.block_size, dim=2),
            strict=True,
        )
        for part, block in parts:
            # Neither the anchor's length nor the number of keys changes the order.
            torch.sum(F.normalize(block.to(dtype), dim=-1).mul_(anchor), -1, out=part)
        candidates = scores.neg_()[..., : length - self.recent]
        return keep_best(candidates, rows=rows, length=length)
