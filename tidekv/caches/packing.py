"""Groups of numbers as codes of a few bits: uniform steps between a group's extremes.

    scale = (max - min) / (2^bits - 1),  zero = min,  code = round((x - zero) / scale)

``scale`` and ``zero`` are rounded to the dtype of the numbers first and codes are made with what
is stored, so an error is at most half a step, plus what that rounding takes from the range.
Bits per number: ``bits`` + 2·(bits of the dtype) / g.

Shapes: g numbers of a group; … anything before.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Packed:
    """Codes (…, g·bits/8), uint8, the lowest bits first; scale and zero (…), of the dtype."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.codes, self.scale, self.zero

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Packed":
        """``change`` applied to each tensor."""
        return Packed(*map(change, self.tensors()))

    def split(self, size: int, dim: int) -> "Iterator[Packed]":
        """Views of ``size`` entries along ``dim``; the last may be smaller."""
        for parts in zip(*(tensor.split(size, dim) for tensor in self.tensors()), strict=True):
            yield Packed(*parts)


def join(parts: Sequence[Packed], dim: int) -> Packed:
    """Groups one after the other along ``dim``."""
    each = zip(*(part.tensors() for part in parts), strict=True)
    return Packed(*(torch.cat(tensors, dim) for tensors in each))


def quantise(numbers: torch.Tensor, bits: int) -> Packed:
    """Groups (…, g) to codes; g·bits is a multiple of 8."""
    steps = 2**bits - 1
    exact = numbers.to(_wide(numbers.dtype))
    low, high = exact.aminmax(dim=-1)
    scale, zero = ((high - low) / steps).to(numbers.dtype), low.to(numbers.dtype)
    step = scale.to(exact.dtype).unsqueeze(-1)
    # Where all numbers of a group are the same there is no step, and code 0 says it all.
    codes = (exact - zero.to(exact.dtype).unsqueeze(-1)).div_(step.where(step > 0, torch.inf))
    return Packed(pack(codes.round_().clamp_(0, steps).to(torch.uint8), bits), scale, zero)


def dequantise(packed: Packed, bits: int) -> torch.Tensor:
    """Codes to groups (…, g), in fp32 or wider."""
    dtype = _wide(packed.scale.dtype)
    numbers = unpack(packed.codes, bits).to(dtype)
    return numbers.mul_(packed.scale.unsqueeze(-1)).add_(packed.zero.unsqueeze(-1))


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers below 2^bits, uint8, (…, n) to (…, n·bits/8): 8/bits of them in a byte."""
    parts = codes.unflatten(-1, (-1, 8 // bits)) << _shifts(bits, codes.device)
    return parts.sum(-1, dtype=torch.uint8)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of :func:`pack`."""
    parts = packed.unsqueeze(-1) >> _shifts(bits, packed.device)
    return parts.bitwise_and_(2**bits - 1).flatten(-2)


def _shifts(bits: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
