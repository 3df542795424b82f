"""What a selector is given at the end of a layer, and what it gives back."""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class LayerEnd:
    """One layer whose prompt is complete.

    Shapes: queries (B, Hq, W, D), the last W rows, and keys, values (B, Hkv, S, D); queries and
    keys are rotated. ``scaling`` is the factor on the attention logits.
    """

    index: int
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scaling: float


class Selector(Protocol):
    """Chooses rows; a frozen dataclass whose fields are the method's parameters."""

    @property
    def window(self) -> int:
        """How many of the last queries :meth:`select` reads, at least 1."""
        ...

    def check(self, prompt_tokens: int, rows: int) -> None:
        """
        Raises:
            InfeasibleError: a prompt of this length can't be cut to ``rows`` rows.
        """
        ...

    def select(self, layer: LayerEnd, rows: int, scoring: str) -> torch.Tensor:
        """Exactly ``rows`` positions per KV head in ascending order: (B, Hkv, rows), int64."""
        ...
