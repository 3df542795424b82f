"""The last rows and nothing else: a sliding window."""

from dataclasses import dataclass

import torch

from tidekv.selectors.base import LayerEnd, Selector


@dataclass(frozen=True)
class Recent(Selector):
    """Keep the last rows: a baseline that reads nothing."""

    def select(self, layer: LayerEnd, rows: int, scoring: str) -> torch.Tensor:
        """See :meth:`tidekv.selectors.base.Selector.select`."""
        return ends(layer.keys, rows)


def ends(keys: torch.Tensor, rows: int, sinks: int = 0) -> torch.Tensor:
    """The first ``sinks`` and the last rows of (B, Hkv, S, D): (B, Hkv, rows), int64."""
    first = torch.arange(sinks, device=keys.device)
    last = torch.arange(keys.shape[2] - rows + sinks, keys.shape[2], device=keys.device)
    return torch.cat((first, last)).repeat(*keys.shape[:2], 1)
