"""A plan for the CPU: its large tensors are fake, its small ones real.

What is small (token ids, positions, masks, numbers) is computed, so its values are known; what is
large, or follows from something fake, is a fake tensor on ``cpu``. There is no allocator to
simulate: the tensor source books each storage as it does in a real run. A small tensor that
something fake was written into counts as fake from then on.
"""

import functools
import importlib
import weakref
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor

from memtrace.fake_gpu import mode, outcomes
from memtrace.fake_gpu.mode import FakeGpu, returns_new
from memtrace.fake_gpu.tensors import Lease, is_fake, leases
from memtrace.virtual_gpu import values

#: Bytes up to which what an operator takes, and a new tensor, is small.
SMALL = 1 << 20

_CPU = torch.device("cpu")


class HostMemory:
    """Where fake storages lie on the host: each at an address that nothing else has."""

    def __init__(self) -> None:
        self._numbers = count(1)

    def allocate(self, storage: torch.UntypedStorage, size: int, device: torch.device) -> None:
        """As :class:`memtrace.fake_gpu.tensors.Memory` has it."""
        lease = Lease(storage, self._died)
        lease.address = next(self._numbers) << 48
        lease.key = key = storage._cdata
        leases[key] = lease

    def settle(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        """As :class:`memtrace.fake_gpu.tensors.Memory` has it."""
        if storage._cdata not in leases:
            self.allocate(storage, storage.nbytes(), device)

    def card(self, device: torch.device) -> None:
        """The CPU has no figures that its tensors depend on."""
        return

    def _died(self, dead: Any) -> None:
        key: int = dead.key
        if leases.get(key) is dead:
            del leases[key]


class FakeHost(FakeGpu):
    """Answers every operator of one thread on something large."""

    def _place(self, func: Any, args: Any, kwargs: Any) -> torch.device | None:
        device = kwargs.get("device")
        if device is not None and device.type != "cpu":
            return None
        given = list(_tensors((args, tuple(kwargs.values()))))
        if any(map(_unknown, given)):
            for one in outcomes.written(func, args, kwargs):
                if not is_fake(one):
                    _spoilt.add(one.untyped_storage())
            return _CPU
        if not returns_new(func) or any(one.device.type != "cpu" for one in given):
            return None
        size = sum(one.numel() * one.element_size() for one in given)
        if not given or size <= SMALL:
            size = outcomes.bytes_of(func, args, kwargs, _CPU)
        return _CPU if size > SMALL else None


#: Small storages that hold something that isn't known.
_spoilt: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()


def _unknown(tensor: Tensor) -> bool:
    return is_fake(tensor) or (bool(_spoilt) and tensor.untyped_storage() in _spoilt)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            if value.layout == torch.strided:
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def install() -> None:
    """Count reads, and have PyTorch's own of memory, which no dispatch mode sees, find zeros.

    PyTorch's rules for shapes import ``torch._dynamo``, which calls operators itself while it is
    imported (as of torch 2.8): answered by then, these would need it whole.
    """
    importlib.import_module("torch._dynamo")
    mode.tell = lambda size: values.count_read("item")
    for name in ("tolist", "numpy", "__array__"):
        setattr(Tensor, name, _of_zeros(getattr(Tensor, name)))


def _of_zeros(plain: Any) -> Any:
    @functools.wraps(plain)
    def read(tensor: Tensor, *args: Any, **options: Any) -> Any:
        if is_fake(tensor):
            values.count_read("copy to host")
            tensor = torch.zeros(tensor.shape, dtype=tensor.dtype)
        return plain(tensor, *args, **options)

    return read
