"""Heads that keep unequal numbers of rows, of a few bits.

Of the prompt each head's newest rows stay as they are and its older ones are quantised, in whole
groups, so that no group has rows of two heads. What is decoded, a row in every head with each
token, is quantised as in a layer of equal heads.

Shapes: as in :mod:`tidekv.caches.ragged`; N quantised and R other kept rows of all heads together,
T = N + R.
"""

from dataclasses import dataclass, replace

import torch

from memtrace import scopes
from tidekv.caches.compact import RESIDENT, CompactCache
from tidekv.caches.packing import Packed
from tidekv.caches.quantised import Axis, QuantisedLayer
from tidekv.caches.ragged import Flat, RaggedLayer, starts


@dataclass(frozen=True)
class QuantisedFlat(Flat):
    """Kept rows of which ``keys`` and ``values`` (R, D) are the newest of each head.

    Attributes:
        packed: older keys and values, (1, 1, N, D) if unpacked, head after head.
        axes: how these are quantised.
        old: how many of them each head has, (p, Hkv), int64.
    """

    packed: tuple[Packed, Packed]
    axes: tuple[Axis, Axis]
    old: torch.Tensor

    @classmethod
    def of(cls, flat: Flat, axes: tuple[Axis, Axis], residual: int) -> Flat:
        """The same rows, at most ``residual`` of each head in full."""
        with scopes.component("Temp"):
            counts, group = flat.counts, axes[0].group
            old = (counts - residual).clamp_(min=0).add_(group - 1) // group * group
            head = torch.arange(counts.numel(), device=counts.device)
            head = head.repeat_interleave(counts.flatten(), output_size=flat.total)
            row = torch.arange(flat.total, device=counts.device) - starts(counts).flatten()[head]
            older = row < old.flatten()[head]
            if not bool(older.any()):
                return flat
            packed = (
                axes[0].append(None, flat.keys[older][None, None]),
                axes[1].append(None, flat.values[older][None, None]),
            )
            newest = older.logical_not()
        with scopes.component(RESIDENT):
            keys, values = flat.keys[newest], flat.values[newest]
        scopes.retag(old, RESIDENT)
        return cls(keys, values, counts, flat.prompts, packed, axes, old)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        packed = (tensor for one in self.packed for tensor in one.tensors())
        return *super().tensors(), *packed, self.old

    def to(self, device: torch.device) -> Flat:
        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device)

        keys, values = (one.map(move) for one in self.packed)
        own = vars(super().to(device))
        return replace(self, **own, packed=(keys, values), old=move(self.old))

    @property
    def total(self) -> int:
        return self.packed[1].codes.shape[2] + len(self.keys)

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Older rows of all heads, block by block, and then the newest of all heads."""
        keys = self.axes[0].all_rows(self.packed[0], self.keys[None, None])
        values = self.axes[1].all_rows(self.packed[1], self.values[None, None])
        return keys[0, 0], values[0, 0]

    def places(self, longest: int) -> torch.Tensor:
        row, old = self._row(longest), self.old[self.prompts]
        older = starts(self.old)[self.prompts] + row
        before = self.total - len(self.keys) - self.old + starts(self.counts - self.old)
        newest = before[self.prompts] + row
        return older.where(row < old, newest).clamp_(max=self.total - 1)


class QuantisedRaggedLayer(RaggedLayer, QuantisedLayer):
    """A layer that holds T kept rows, however they spread over the heads, in a few bits.

    Of a head's kept rows at most ``residual`` are in full, and of the decoded ones too. A quantised
    value takes what it takes in a :class:`QuantisedLayer`, N·2·D values of the prompt and n·2·D of
    each head and batch entry for n decoded rows. Besides, by head and batch entry,
    8·(2·p·Hkv + B) bytes, or 8·(p·Hkv + B) where nothing of the prompt is quantised.
    """

    def store_flat(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        counts: torch.Tensor,
        *,
        prompt_tokens: int,
        longest: int | None = None,
    ) -> None:
        """As :meth:`RaggedLayer.store_flat`, all in full until :meth:`finish`.

        Raises:
            InfeasibleError: no row at all, or the head size isn't a multiple of the group.
        """
        self.check(head_size=values.shape[-1], unequal_heads=True)
        self._old = None
        super().store_flat(keys, values, counts, prompt_tokens=prompt_tokens, longest=longest)

    def finish(self) -> None:
        """As :meth:`QuantisedLayer.finish`, in each head."""
        super().finish()
        if self._flat is not None and not isinstance(self._flat, QuantisedFlat):
            self._flat = QuantisedFlat.of(self._flat, self._axes, self.residual)


class QuantisedRaggedCache(CompactCache):
    """Rows of 2 or 4 bits for selectors that spread a layer's budget over its heads unevenly."""

    layer_class = QuantisedRaggedLayer
