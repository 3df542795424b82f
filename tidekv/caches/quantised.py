"""Kept rows of a few bits (KIVI: Liu et al. 2024, arXiv 2402.02750, section 3).

Keys have outlier channels, values don't: keys are quantised per channel, in groups of ``group``
rows, and values per row, in groups of ``group`` channels. The newest rows stay as they are.

Shapes: B batch, Hkv KV heads, N quantised rows, g rows or channels of a group, D head size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memtrace import scopes
from tidekv import options
from tidekv.caches.compact import RESIDENT, CompactCache, CompactLayer
from tidekv.caches.packing import Packed, dequantise, join, quantise
from tidekv.errors import InfeasibleError, check_choice

#: Rows that are quantised, or made numbers again, at a time.
_BLOCK = 1024


@dataclass(frozen=True)
class Axis:
    """Along what the numbers of a group run: rows, as for keys, or channels, as for values."""

    group: int
    bits: int
    over_rows: bool

    def append(self, packed: Packed | None, rows: torch.Tensor) -> Packed:
        """Quantise rows (B, Hkv, n, D), block by block, behind those there are.

        Entries along the third dimension: (B, Hkv, N/g, D, g) or (B, Hkv, N, D/g, g) if unpacked.
        """
        parts = [] if packed is None else [packed]
        with scopes.component("Temp"):
            for block in rows.split(self._block * (self.group if self.over_rows else 1), dim=2):
                if self.over_rows:
                    groups = block.unflatten(2, (-1, self.group)).mT
                else:
                    groups = block.unflatten(3, (-1, self.group))
                parts.append(quantise(groups, self.bits))
        with scopes.component(RESIDENT):
            return join(parts, dim=2)

    def all_rows(self, packed: Packed, new: torch.Tensor) -> torch.Tensor:
        """What was quantised, block by block, and then ``new`` rows: (B, Hkv, N + r, D)."""
        entries = packed.codes.shape[2]
        done = entries * self.group if self.over_rows else entries
        rows = new.new_empty(*new.shape[:2], done + new.shape[2], new.shape[3])
        rows[:, :, done:] = new
        start = 0
        for part in packed.split(self._block, dim=2):
            groups = dequantise(part, self.bits)
            block = groups.mT.flatten(2, 3) if self.over_rows else groups.flatten(3)
            rows[:, :, start : start + block.shape[2]] = block
            start += block.shape[2]
        return rows

    @property
    def _block(self) -> int:
        """Entries along the third dimension that are worked on at a time."""
        return max(_BLOCK // self.group, 1) if self.over_rows else _BLOCK


class QuantisedLayer(CompactLayer):
    """A layer that holds at most ``residual`` rows in full and the older ones quantised.

    ``keys`` and ``values`` (B, Hkv, r, D) are the newest rows. Whenever they are more than
    ``residual``, whole groups of the oldest are quantised until they aren't, so that
    ``residual`` - ``group`` < r ≤ ``residual`` once there are that many rows. The authors keep
    values and keys for different times; here both are quantised together.

    A quantised value takes ``bits`` + 2·w/``group`` bits, w = 16 in fp16 and bf16 (3 bits with 2
    and 32), in N·2·D values of each head. Attention code gets all rows in the model's dtype, made
    for the layer that runs.
    """

    def __init__(self, bits: int = 2, group: int = 32, residual: int = 128) -> None:
        """
        Args:
            bits: of a code, 2 or 4.
            group: numbers that share a scale and a zero.
            residual: rows that stay as they are, a multiple of ``group``.

        Raises:
            InfeasibleError: these can't be.
        """
        self.bits, self.group, self.residual = bits, group, residual
        options.check(self)
        check_choice("number of bits", str(bits), ("2", "4"))
        if group < 8 or group % 8:
            raise InfeasibleError(f"A group must be a multiple of 8 numbers, not {group}.")
        if residual < group or residual % group:
            raise InfeasibleError(
                f"The rows that stay as they are must be a multiple of the group of {group}, not "
                f"{residual}."
            )
        super().__init__()
        self._axes = Axis(group, bits, over_rows=True), Axis(group, bits, over_rows=False)
        self._old: tuple[Packed, Packed] | None = None  # keys and values

    def check(self, *, head_size: int, unequal_heads: bool) -> None:
        """As :meth:`CompactLayer.check`; groups must divide the head size."""
        super().check(head_size=head_size, unequal_heads=unequal_heads)
        if head_size % self.group:
            raise InfeasibleError(
                f"Values are quantised in groups of {self.group} channels, which don't divide a "
                f"head of {head_size}; use a group that does."
            )

    def store(self, keys: torch.Tensor, values: torch.Tensor, *, dropped: int) -> None:
        """As :meth:`CompactLayer.store`, all in full until :meth:`finish`.

        Raises:
            InfeasibleError: the head size isn't a multiple of the group.
        """
        self.check(head_size=values.shape[-1], unequal_heads=False)
        self._old = None
        super().store(keys, values, dropped=dropped)

    def shrink(self, indices: torch.Tensor) -> None:
        """As :meth:`CompactLayer.shrink`, while nothing is quantised."""
        if self._old is not None:
            raise InfeasibleError("A layer can't shrink once its rows are quantised.")
        super().shrink(indices)

    def finish(self) -> None:
        """Quantise whole groups of the oldest rows, until at most ``residual`` are in full."""
        assert self.keys is not None and self.values is not None
        excess = self.keys.shape[2] - self.residual
        if excess <= 0:
            return
        count = -(-excess // self.group) * self.group
        before = self._old or (None, None)
        self._old = (
            self._axes[0].append(before[0], self.keys[:, :, :count]),
            self._axes[1].append(before[1], self.values[:, :, :count]),
        )
        with scopes.component(RESIDENT):
            # Copies: views would keep the rows that were quantised.
            self.keys = self.keys[:, :, count:].clone()
            self.values = self.values[:, :, count:].clone()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append (B, Hkv, new, D); returns all rows, the new ones not yet quantised.

        What the first call appends without a :meth:`store` before is a prompt that may still be
        chosen from: it is quantised by the next one.
        """
        self.check(head_size=value_states.shape[-1], unequal_heads=False)
        first = not self.is_initialized
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if self._old is not None:
            with scopes.component("Temp"):
                keys = self._axes[0].all_rows(self._old[0], keys)
                values = self._axes[1].all_rows(self._old[1], values)
        if not first:
            self.finish()
        return keys, values

    def reset(self) -> None:
        """Forget all rows."""
        super().reset()
        self._old = None

    def to(self, device: torch.device) -> None:
        """As :meth:`CompactLayer.to`."""
        super().to(device)
        self._map_old(lambda tensor: tensor.to(device))

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything the layer holds on the device."""
        yield from super().tensors()
        for packed in self._old or ():
            yield from packed.tensors()

    def _crop(self, removed: int) -> None:
        assert self.keys is not None
        if removed > self.keys.shape[2]:
            raise InfeasibleError(
                f"Of the tokens decoded so far only the last {self.keys.shape[2]} can be removed, "
                f"the others are quantised, not {removed}; use a larger residual."
            )
        super()._crop(removed)

    def _change_batch(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super()._change_batch(change)
        self._map_old(change)

    def _map_old(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self._old is not None:
            with scopes.component(RESIDENT):
                self._old = self._old[0].map(change), self._old[1].map(change)


class QuantisedCache(CompactCache):
    """Rows of 2 or 4 bits, the newest in full (KIVI).

    Its parameters are those of :class:`QuantisedLayer`.
    """

    layer_class = QuantisedLayer
