"""Heads that keep unequal numbers of rows, of a few bits.

Of the prompt each head's newest rows stay as they are and its older ones are quantised, in whole
groups, so that no group has rows of two heads. What is decoded, a row in every head with each
token, is quantised as in a layer of equal heads.

How many rows that makes depends on the prompt, how many they can be does not. So both parts are as
long as they can be: nobody waits for the device to say how long, and what a layer takes is known
before it runs.

Shapes: as in :mod:`tidekv.caches.ragged`; N rows that can be quantised and R others, of all heads
together, T ≤ N + R.
"""

from dataclasses import dataclass, replace

import torch

from memtrace import scopes
from tidekv.budgets import quantised
from tidekv.caches.compact import RESIDENT, CompactCache
from tidekv.caches.packing import Packed
from tidekv.caches.quantised import Axis, QuantisedLayer
from tidekv.caches.ragged import Flat, RaggedLayer, starts


@dataclass(frozen=True)
class QuantisedFlat(Flat):
    """Kept rows of which ``keys`` and ``values`` (R, D) are the newest of each head.

    Behind the last head's there may be copies of some row, up to N and R.

    Attributes:
        packed: older keys and values, (1, 1, N, D) if unpacked, head after head.
        axes: how these are quantised.
        old: how many of them each head has, (p, Hkv), int64.
        rows_kept: T.
    """

    packed: tuple[Packed, Packed]
    axes: tuple[Axis, Axis]
    old: torch.Tensor
    rows_kept: int

    @classmethod
    def of(cls, flat: Flat, axes: tuple[Axis, Axis], residual: int, least: int) -> Flat:
        """The same rows, at most ``residual`` of each head in full.

        Args:
            least: rows that each head has at least.
        """
        counts, group = flat.counts, axes[0].group
        most = quantised(flat.total, counts.numel(), least=least, residual=residual, group=group)
        if most[0] == 0:
            return flat
        with scopes.component("Temp"):
            old = (counts - residual).clamp_(min=0).add_(group - 1) // group * group
            head = torch.arange(counts.numel(), device=counts.device)
            head = head.repeat_interleave(counts.flatten(), output_size=flat.total)
            row = torch.arange(flat.total, device=counts.device) - starts(counts).flatten()[head]
            older = row < old.flatten()[head]
            del head, row
            at = _true(older, most[0])
            packed = (
                axes[0].append(None, flat.keys[at][None, None]),
                axes[1].append(None, flat.values[at][None, None]),
            )
            at = _true(older.logical_not_(), most[1])
        with scopes.component(RESIDENT):
            keys, values = flat.keys[at], flat.values[at]
        scopes.retag(old, RESIDENT)
        return cls(keys, values, counts, flat.prompts, packed, axes, old, flat.total)

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
        return self.rows_kept

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Older rows of all heads, block by block, and then the newest of all heads."""
        keys = self.axes[0].all_rows(self.packed[0], self.keys[None, None])
        values = self.axes[1].all_rows(self.packed[1], self.values[None, None])
        return keys[0, 0], values[0, 0]

    def places(self, longest: int) -> torch.Tensor:
        row, old = self._row(longest), self.old[self.prompts]
        older = starts(self.old)[self.prompts] + row
        packed = self.packed[1].codes.shape[2]
        newest = (packed - self.old + starts(self.counts - self.old))[self.prompts] + row
        return older.where(row < old, newest).clamp_(max=packed + len(self.keys) - 1)


def _true(mask: torch.Tensor, number: int) -> torch.Tensor:
    """Where ``mask`` is true, and then 0 up to a ``number`` that the host knows."""
    return torch.nonzero_static(mask, size=number, fill_value=0).squeeze(1)


class QuantisedRaggedLayer(RaggedLayer, QuantisedLayer):
    """A layer that holds T kept rows, however they spread over the heads, in a few bits.

    Of a head's kept rows at most ``residual`` are in full, and of the decoded ones too. A quantised
    value takes what it takes in a :class:`QuantisedLayer`, N·2·D values of the prompt and n·2·D of
    each head and batch entry for n decoded rows; R·2·D are in full. Besides, by head and batch
    entry, 8·(2·p·Hkv + B) bytes, or 8·(p·Hkv + B) where nothing of the prompt is quantised.
    """

    _least = 0

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
        """As :meth:`RaggedLayer.store_flat`, all in full until :meth:`finish`.

        Raises:
            InfeasibleError: no row at all, or the head size isn't a multiple of the group.
        """
        self.check(head_size=values.shape[-1], unequal_heads=True)
        self._old, self._least = None, least
        super().store_flat(keys, values, counts, prompt_tokens=prompt_tokens, longest=longest)

    def finish(self) -> None:
        """As :meth:`QuantisedLayer.finish`, in each head."""
        super().finish()
        if self._flat is not None and not isinstance(self._flat, QuantisedFlat):
            self._flat = QuantisedFlat.of(self._flat, self._axes, self.residual, self._least)


class QuantisedRaggedCache(CompactCache):
    """Rows of 2 or 4 bits for selectors that spread a layer's budget over its heads unevenly."""

    layer_class = QuantisedRaggedLayer
