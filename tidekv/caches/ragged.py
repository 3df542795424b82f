"""Heads that keep unequal numbers of rows, one after the other without gaps.

Shapes: B batch, p prompts (B = p until ``generate`` makes several of one), Hkv KV heads, T kept
rows of all heads together, m rows decoded since, D head size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from memtrace import scopes
from tidekv.caches.compact import RESIDENT, CompactCache, CompactLayer
from tidekv.errors import InfeasibleError


@dataclass(frozen=True)
class Flat:
    """Kept rows: keys, values (T, D), rows per head (p, Hkv); prompt of each batch entry (B,)."""

    keys: torch.Tensor
    values: torch.Tensor
    counts: torch.Tensor
    prompts: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Everything that is held."""
        return self.keys, self.values, self.counts, self.prompts

    def to(self, device: torch.device) -> "Flat":
        """Everything on ``device``."""
        own = (self.keys, self.values, self.counts, self.prompts)
        return Flat(*(tensor.to(device) for tensor in own))

    @property
    def total(self) -> int:
        """T."""
        return len(self.keys)

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values, (T, D), where :meth:`places` says."""
        return self.keys, self.values

    def places(self, longest: int) -> torch.Tensor:
        """Where in :meth:`rows` the kept row r of an entry's head is, (``longest``, B, Hkv).

        Padding repeats a head's last row: it is hidden, but must be a finite number.
        """
        places = self._row(longest).add_(starts(self.counts)[self.prompts])
        return places.clamp_(max=self.total - 1)  # a last head without rows begins at T

    def _row(self, longest: int) -> torch.Tensor:
        """0, 1, … and then the last row of each entry's head, (``longest``, B, Hkv)."""
        last = (self.counts - 1).clamp_(min=0)
        row = torch.arange(longest, device=last.device).view(-1, 1, 1)
        return row.minimum(last[self.prompts])


def starts(counts: torch.Tensor) -> torch.Tensor:
    """How many rows lie before those of each head, of ``counts`` (p, Hkv)."""
    return counts.flatten().cumsum(0).view_as(counts) - counts


class RaggedLayer(CompactLayer):
    """A layer that holds T kept rows, however they spread over the heads.

    Every head gains a row with each token, so decoded rows are a common tensor behind the kept
    ones (``keys`` and ``values``, (B, Hkv, m, D)) and a token never moves what was kept. Bytes:
    (T + B·Hkv·m)·2·D values and, by head and batch entry, 8·(p·Hkv + B). Beams and returned
    sequences of one prompt share its kept rows.

    Attention code gets (B, Hkv, longest + m, D), built for the layer that runs.
    """

    _flat: Flat | None = None

    @property
    def ragged(self) -> bool:
        """Whether the heads keep unequal numbers of rows: :meth:`store_flat` was called."""
        return self._flat is not None

    def check(self, *, head_size: int, unequal_heads: bool) -> None:
        """As :meth:`CompactLayer.check`; heads may be unequal."""
        super().check(head_size=head_size, unequal_heads=False)

    def store(self, keys: torch.Tensor, values: torch.Tensor, *, dropped: int) -> None:
        """As :meth:`CompactLayer.store`: equally many rows in each head."""
        super().store(keys, values, dropped=dropped)
        self._flat = None

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
        """Hold these rows, and only these, from now on.

        Args:
            keys, values: (T, D); head after head, those of the first prompt first, each in
                ascending order. The layer owns them now.
            counts: (B, Hkv), int64 on the device: rows of each head; they sum up to T.
            prompt_tokens: rows that there were.
            longest: the largest count or more, if the host knows one: what a head is padded to
                while it runs. None reads it from the device, which waits for it.
            least: the smallest count or less, if the host knows one.

        Raises:
            InfeasibleError: no row at all.
        """
        if len(keys) == 0:
            raise InfeasibleError("A layer must keep at least one row; use a larger budget.")
        batch, heads = counts.shape
        # At least one: transformers' mask has a column for the prompt, whatever was kept of it.
        with scopes.component("Temp"):
            self.kept = max(int(counts.max()) if longest is None else longest, 1)
        self.dropped, self.decoded = prompt_tokens - self.kept, 0
        nothing = keys.new_empty(batch, heads, 0, keys.shape[-1])
        self._hold(nothing, values.new_empty(batch, heads, 0, values.shape[-1]))
        with scopes.component(RESIDENT):
            prompts = torch.arange(batch, device=counts.device)
        self._flat = Flat(keys, values, counts, prompts)
        for tensor in (keys, values, counts):
            scopes.retag(tensor, RESIDENT)

    def shrink(self, indices: torch.Tensor) -> None:
        """As :meth:`CompactLayer.shrink`, but only of equal numbers of rows."""
        if self._flat is not None:
            raise InfeasibleError("A layer whose heads keep unequal numbers of rows can't shrink.")
        super().shrink(indices)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append (B, Hkv, new, D); returns heads padded to ``kept`` rows and the decoded rows."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if self._flat is None:
            return keys, values
        with scopes.component("Temp"):
            kept, places = self._flat.rows(), self._flat.places(self.kept)
            return _padded(kept[0], places, keys), _padded(kept[1], places, values)

    def visible(self) -> torch.Tensor | None:
        """(B, Hkv, kept), which of the kept rows that :meth:`update` returns are no padding."""
        if self._flat is None:
            return None
        with scopes.component("Temp"):
            row = torch.arange(self.kept, device=self._flat.counts.device)
            return row < self._flat.counts[self._flat.prompts].unsqueeze(-1)

    def reset(self) -> None:
        """Forget all rows."""
        super().reset()
        self._flat = None

    def to(self, device: torch.device) -> None:
        """As :meth:`CompactLayer.to`."""
        super().to(device)
        if self._flat is not None:
            with scopes.component(RESIDENT):
                self._flat = self._flat.to(device)

    def rows(self) -> float:
        """Rows held in a head, on average."""
        if self._flat is None:
            return super().rows()
        return self._flat.total / self._flat.counts.numel() + self.decoded

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything the layer holds on the device."""
        yield from super().tensors()
        if self._flat is not None:
            yield from self._flat.tensors()

    def _change_batch(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super()._change_batch(change)
        if self._flat is not None:
            with scopes.component(RESIDENT):
                self._flat = replace(self._flat, prompts=change(self._flat.prompts))


def _padded(flat: torch.Tensor, places: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
    """Rows (T, D) at ``places`` (kept, B, Hkv), then decoded ones (B, Hkv, m, D).

    Rows come first in memory, so that both parts are written where they belong in one go.
    """
    kept, rows = len(places), len(places) + decoded.shape[2]
    padded = flat.new_empty(rows, *places.shape[1:], flat.shape[-1])
    torch.index_select(flat, 0, places.flatten(), out=padded[:kept].view(-1, flat.shape[-1]))
    padded[kept:] = decoded.permute(2, 0, 1, 3)
    return padded.permute(1, 2, 0, 3)


class RaggedCache(CompactCache):
    """A cache for selectors that spread a layer's budget over its heads unevenly."""

    layer_class = RaggedLayer
