"""A cache that stays on the host: each layer's rows visit the device while its attention runs."""

from typing import Any, ClassVar

import torch

from memtrace import scopes
from tidekv.caches.compact import CompactCache, CompactLayer


class HostLayer(CompactLayer):
    """One layer, its ``keys`` and ``values`` (B, Hkv, rows, D) on the host."""

    def store(self, keys: torch.Tensor, values: torch.Tensor, *, dropped: int) -> None:
        """As :meth:`CompactLayer.store`, wherever the rows are."""
        super().store(keys.cpu(), values.cpu(), dropped=dropped)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append (B, Hkv, new, D), and all rows where those came from, until attention is done."""
        if not self.is_initialized:  # the prompt: the layer that runs needs it where it is
            return super().update(key_states, value_states, *args, **kwargs)
        keys, values = super().update(key_states.cpu(), value_states.cpu(), *args, **kwargs)
        with scopes.component("Temp"):
            return keys.to(key_states.device), values.to(value_states.device)

    def to(self, device: torch.device) -> None:
        """Rows stay where they are; they visit ``device`` anyway."""


class HostCache(CompactCache):
    """Every layer on the host."""

    layer_class: ClassVar[type[CompactLayer]] = HostLayer
