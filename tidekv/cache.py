"""A transformers ``Cache`` whose layers hold fewer rows than tokens were seen.

The *logical* length (tokens seen) decides positions and how ``generate`` slices its input; the
*physical* length (rows kept) decides the mask. Kept rows carry their original rotary positions.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from memtrace import scopes
from tidekv.compat import new_rows


class CompactLayer(DynamicLayer):
    """One layer: ``keys`` and ``values`` of shape (B, Hkv, rows, D), and how many were dropped."""

    keys: torch.Tensor | None
    values: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.dropped = 0

    def store(self, keys: torch.Tensor, values: torch.Tensor, *, dropped: int) -> None:
        """Hold these rows from now on; ``dropped`` rows of the prompt are not among them."""
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self.dropped = dropped
        scopes.retag(keys, "KV_res/compact")
        scopes.retag(values, "KV_res/compact")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append (B, Hkv, new, D); the first call is the prompt of the layer that runs."""
        detail = "compact" if self.is_initialized else "full"
        with scopes.component(f"KV_res/{detail}"):
            updated: tuple[torch.Tensor, torch.Tensor] = super().update(
                key_states, value_states, *args, **kwargs
            )
        return updated

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return int(super().get_seq_length()) + self.dropped

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """(rows after the update, offset of row 0).

        The offset makes every kept row older than any new token, so a question of several tokens
        sees all of them and stays causal in itself.
        """
        rows = int(super().get_seq_length())
        return rows + new_rows(query_length), self.dropped

    def reset(self) -> None:
        """Forget all rows, in every release (4.57 would zero them and keep their number)."""
        self.keys = self.values = None
        self.is_initialized = False
        self.dropped = 0


class CompactCache(Cache):
    """One :class:`CompactLayer` per decoder layer; what plain ``generate()`` takes."""

    layers: list[CompactLayer]

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[CompactLayer() for _ in range(num_layers)])
        #: 1 while the logits of the last prompt token wait to be handed to ``generate``.
        self.pending = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, less the pending one."""
        return int(super().get_seq_length(layer_idx)) - self.pending

    def rows(self) -> list[int]:
        """Rows kept, layer by layer."""
        return [0 if layer.keys is None else layer.keys.shape[-2] for layer in self.layers]

    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(
            int(tensor.nbytes)
            for layer in self.layers
            for tensor in (layer.keys, layer.values)
            if tensor is not None
        )
