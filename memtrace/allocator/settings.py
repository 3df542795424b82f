"""The allocator's settings as far as they decide the size of a block."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

#: Every block is at least this large and a multiple of it.
MIN_BLOCK = 512
#: Up to this rounded size a block comes from the small pool; in the large pool this much more than
#: was asked for stays inside a block.
SMALL_LIMIT = 1 << 20
#: No limit, as PyTorch has it.
UNLIMITED = (1 << 64) - 1

_PLAIN = (0,) * 16


@dataclass(frozen=True)
class Settings:
    """``PYTORCH_CUDA_ALLOC_CONF``, parsed.

    ``max_split_size``: bytes; larger blocks are not split.
    ``divisions``: ``roundup_power2_divisions`` for sizes below 2 MiB, below 4 MiB, … and from
    32 GiB on (16 values; 0 and 1 mean none).
    """

    max_split_size: int = UNLIMITED
    divisions: tuple[int, ...] = _PLAIN

    @classmethod
    def of_snapshot(cls, found: Mapping[str, Any]) -> Self:
        """From ``allocator_settings`` of ``torch.cuda.memory._snapshot()``."""
        split = found.get("max_split_size", -1)
        divisions = found.get("roundup_power2_divisions") or {}
        return cls(
            max_split_size=UNLIMITED if split < 0 else split,
            divisions=tuple(int(divisions.get(str(1 << n), 0)) for n in range(16)),
        )

    def round(self, requested: int) -> int:
        """The size of the block that a request of so many bytes asks for."""
        if self.divisions is not _PLAIN and requested > MIN_BLOCK:
            index = min(max(requested.bit_length() - 21, 0), 15)
            divisions = self.divisions[index]
            if divisions > 1 and requested > MIN_BLOCK * divisions:
                return _round_to_division(requested, divisions)
        return max(MIN_BLOCK, (requested + MIN_BLOCK - 1) & -MIN_BLOCK)


def _round_to_division(size: int, divisions: int) -> int:
    """``size`` rounded up to the next of ``divisions`` steps between powers of two."""
    power = 1 << (size.bit_length() - 1)
    if size == power:
        return size
    step = power >> (divisions.bit_length() - 1)
    return 2 * power if step == 0 else (size + step - 1) // step * step
