"""A transformers ``Cache`` whose layers hold fewer rows than tokens were seen.

The *logical* length (tokens seen) decides positions and how ``generate`` slices its input; the
*physical* length (rows kept) decides the mask. Kept rows carry their original rotary positions.

transformers makes one mask for all layers. Where all of them kept equally many rows it has a
column for each. Where they didn't, it has one column for all kept rows of the prompt and one for
each token since, and every layer's keys bring what is missing (:mod:`tidekv.caches.masked`).

Shapes: B batch, Hkv KV heads, D head size.
"""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from transformers.cache_utils import Cache, DynamicLayer

from memtrace import scopes
from tidekv.caches.masked import MaskedKeys
from tidekv.compat import new_rows
from tidekv.errors import InfeasibleError

#: The memtrace component of what a cache holds.
RESIDENT = "KV_res/compact"


def past_window(window: int) -> InfeasibleError:
    """Why rows of a prompt can't be dropped and more than ``window`` tokens be read."""
    return InfeasibleError(
        f"The model has layers with a sliding window of {window} tokens, which would count the "
        "rows that are kept as newer than they are; stop at that many tokens of prompt and answer, "
        "or keep every row with selector=None."
    )


def rows_of(
    keys: torch.Tensor, values: torch.Tensor, indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``indices`` (B, Hkv, k) of keys and values (B, Hkv, n, D), each (B, Hkv, k, D)."""
    at = indices.unsqueeze(-1).expand(-1, -1, -1, keys.shape[-1])
    return keys.gather(2, at), values.gather(2, at)


class CompactLayer(DynamicLayer):
    """One layer: ``keys`` and ``values`` of shape (B, Hkv, rows, D).

    Attributes:
        kept: rows of the prompt in each head since :meth:`store`; 0 before.
        dropped: rows of the prompt that are not among them.
        decoded: rows that :meth:`update` appended since.
    """

    keys: torch.Tensor | None
    values: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.kept = self.dropped = self.decoded = 0

    @property
    def ragged(self) -> bool:
        """Whether the heads keep unequal numbers of rows."""
        return False

    def check(self, *, head_size: int, unequal_heads: bool) -> None:
        """
        Raises:
            InfeasibleError: it can't hold heads of this size, or with unequal numbers of rows.
        """
        if unequal_heads:
            raise InfeasibleError(
                f"{type(self).__name__} holds equally many rows in each head; use a selector "
                "without budgets per head, or a RaggedCache."
            )

    def store(self, keys: torch.Tensor, values: torch.Tensor, *, dropped: int) -> None:
        """Hold these rows, and only these, from now on.

        Args:
            keys, values: (B, Hkv, rows, D); the layer owns them now.
            dropped: how many rows of the prompt are not among them.
        """
        self._hold(keys, values)
        self.kept, self.dropped, self.decoded = keys.shape[2], dropped, 0

    def store_flat(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        counts: torch.Tensor,
        *,
        prompt_tokens: int,
        longest: int | None = None,
        least: int = 0,
    ) -> None:
        """Hold unequal numbers of rows; see :meth:`tidekv.caches.ragged.RaggedLayer.store_flat`.

        Raises:
            InfeasibleError: this layer can't.
        """
        self.check(head_size=keys.shape[-1], unequal_heads=True)

    def finish(self) -> None:
        """Hold what is kept in as few bytes as this layer can: it won't shrink any more."""

    def shrink(self, indices: torch.Tensor) -> None:
        """Keep only these of the kept rows; the memory of the others is freed.

        Args:
            indices: (B, Hkv, k), int64, into the rows kept so far, ascending.

        Raises:
            InfeasibleError: tokens were decoded since :meth:`store`.
        """
        if self.keys is None or self.values is None or self.decoded:
            raise InfeasibleError("A layer can shrink only between store and the first update.")
        with scopes.component(RESIDENT):
            keys, values = rows_of(self.keys, self.values, indices.to(self.keys.device))
        self.store(keys, values, dropped=self.dropped + self.kept - indices.shape[2])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append (B, Hkv, new, D); the first call is the prompt of the layer that runs."""
        detail = RESIDENT if self.is_initialized else "KV_res/full"
        with scopes.component(detail):
            updated: tuple[torch.Tensor, torch.Tensor] = super().update(
                key_states, value_states, *args, **kwargs
            )
        self.decoded += key_states.shape[2]
        return updated

    def visible(self) -> torch.Tensor | None:
        """(B, Hkv, kept), which of the kept rows that :meth:`update` returns count; None = all."""
        return None

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return self.dropped + self.kept + self.decoded

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """(rows after the update, offset of row 0).

        The offset makes every kept row older than any new token, so a question of several tokens
        sees all of them and stays causal in itself.
        """
        return self.kept + self.decoded + new_rows(query_length), self.dropped

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens that were decoded.

        Args:
            tokens_to_remove: minus their number; up to transformers 5.2 also what is to be left of
                the tokens seen, as a positive number.

        Raises:
            InfeasibleError: it would reach into the prompt.
        """
        removed = -tokens_to_remove
        if tokens_to_remove > 0:
            removed = max(self.get_seq_length() - tokens_to_remove, 0)
        if removed > self.decoded:
            raise InfeasibleError(
                f"Only the {self.decoded} tokens decoded since the prompt can be removed from the "
                f"cache, not {removed}; prefill the shorter prompt instead."
            )
        if removed:
            self._crop(removed)
            self.decoded -= removed

    def reset(self) -> None:
        """Forget all rows, in every release (4.57 would zero them and keep their number)."""
        self.keys = self.values = None
        self.is_initialized = False
        self.kept = self.dropped = self.decoded = 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Entry i of the batch continues what entry ``beam_idx[i]`` was."""
        self._change_batch(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each entry of the batch becomes ``repeats`` entries."""
        self._change_batch(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only these entries of the batch."""
        self._change_batch(lambda tensor: tensor[indices.to(tensor.device)])

    def to(self, device: torch.device) -> None:
        """Bring everything the layer holds to ``device``."""
        if self.keys is not None and self.values is not None:
            with scopes.component(RESIDENT):
                self.keys, self.values = self.keys.to(device), self.values.to(device)
            self.device = device

    def rows(self) -> float:
        """Rows held in a head; the mean where they differ."""
        return self.kept + self.decoded

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything the layer holds."""
        if self.keys is not None and self.values is not None:
            yield from (self.keys, self.values)

    def _hold(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        scopes.retag(keys, RESIDENT)
        scopes.retag(values, RESIDENT)

    def _crop(self, removed: int) -> None:
        assert self.keys is not None and self.values is not None
        self.keys, self.values = self.keys[:, :, :-removed], self.values[:, :, :-removed]

    def _change_batch(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``change`` to all that has one entry for each of the batch."""
        if self.keys is not None and self.values is not None:
            with scopes.component(RESIDENT):
                self.keys, self.values = change(self.keys), change(self.values)


class CompactCache(Cache):
    """Fewer rows than tokens were seen, in the model's dtype.

    What plain ``generate()`` takes: one layer per decoder layer, which may keep different numbers
    of rows. Other caches differ in what their layers are.
    """

    layers: list[CompactLayer]
    layer_class: ClassVar[type[CompactLayer]] = CompactLayer

    def __init__(self, num_layers: int, **parameters: Any) -> None:
        """``parameters`` are those of the layers."""
        super().__init__(layers=[self.layer_class(**parameters) for _ in range(num_layers)])
        #: 1 while the logits of the last prompt token wait to be handed to ``generate``.
        self.pending = 0
        #: The smallest attention window of the model's layers, if any slides.
        self.window: int | None = None

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to a layer; what its attention code is to use, (B, Hkv, rows, D) each.

        Raises:
            InfeasibleError: see :meth:`check_window`.
        """
        self.check_window(self.layers[layer_idx].get_seq_length() + key_states.shape[2])
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer = self.layers[layer_idx]
        # A layer that holds no kept rows yet is reading its prompt, under the usual mask.
        if layer.kept and not self._one_mask_fits_all():
            keys = MaskedKeys.of(keys, layer.visible(), layer.decoded)
        return keys, values

    def check_window(self, seen: int) -> None:
        """
        Raises:
            InfeasibleError: rows were dropped, and with ``seen`` tokens others leave the window.
                Which ones those are transformers' masks decide by places in the cache.
        """
        if self.window is None or seen <= self.window:
            return
        if any(layer.dropped or layer.ragged for layer in self.layers):
            raise past_window(self.window)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, less the pending one."""
        return int(super().get_seq_length(layer_idx)) - self.pending

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """(columns, position of the first), see the module."""
        layer = self.layers[layer_idx]
        if self._one_mask_fits_all():
            return layer.get_mask_sizes(query_length)
        since_prompt = layer.decoded + new_rows(query_length)
        return 1 + since_prompt, layer.dropped + layer.kept - 1

    def to(self, device: torch.device) -> None:
        """Bring every layer to ``device``."""
        for layer in self.layers:
            layer.to(device)

    def batch_size(self) -> int:
        """Entries of the batch; 0 while nothing is held."""
        keys = self.layers[0].keys
        return 0 if keys is None else keys.shape[0]

    def rows(self) -> list[float]:
        """Rows held in a head, layer by layer; the mean over the heads where they differ."""
        return [layer.rows() for layer in self.layers]

    def nbytes(self) -> int:
        """Bytes of everything the layers hold."""
        return sum(int(tensor.nbytes) for layer in self.layers for tensor in layer.tensors())

    def _one_mask_fits_all(self) -> bool:
        kept = self.layers[0].kept
        return not any(layer.ragged or layer.kept != kept for layer in self.layers)
