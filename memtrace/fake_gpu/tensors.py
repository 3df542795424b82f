"""Tensors without contents: ordinary ones, on storages that have a size and no memory.

They are made as PyTorch makes the shells of wrapper subclasses, and views of them by its kernels
for meta tensors, which touch no memory and keep the device. So they are plain tensors on ``cuda``,
with or without a build for CUDA: parameters, ``data`` and autograd work as on a card. A kernel must
never see one, which is what :class:`memtrace.fake_gpu.mode.FakeGpu` is for.
"""

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

_Key: Any = torch._C.DispatchKey
_Keys: Any = torch._C.DispatchKeySet
_Guard: Any = torch._C._ForceDispatchKeyGuard
_EXPLICIT = _Key.CompositeExplicitAutograd
_alias = torch.ops.aten.alias.default._op_dk
_shell: Any = Tensor._make_wrapper_subclass
address_of_storage: Any = torch._C._storage_address  # type: ignore[attr-defined]
_plain_data_ptr = torch.UntypedStorage.data_ptr
_tensor_data_ptr = Tensor.data_ptr
_tensor_shown = torch._tensor_str._str


class _Shell(Tensor):
    """What a new tensor is made from; never seen outside."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise NotImplementedError(func)


def _above() -> Any:
    """The keys of everything above the kernels: Python, autograd, autocast."""
    with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableTorchDispatch():
        keys: Any = torch._C._dispatch_tls_local_exclude_set()
    for name in ("ADInplaceOrView", "AutogradCPU", "AutogradCUDA", "AutogradMeta"):
        keys = keys | _Keys(getattr(_Key, name))
    return keys


_META, _EXCLUDED = _Keys(_Key.Meta), _above()


class Memory(Protocol):
    """Where the storages of fake tensors lie."""

    def allocate(self, storage: torch.UntypedStorage, size: int, device: torch.device) -> None:
        """Give a storage of ``size`` bytes that is new a block, until it dies."""

    def settle(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        """Give a storage that has none, or has grown, a block of its size."""


class Lease(weakref.ref):
    """A storage that has a block, and what names it."""

    __slots__ = ("address", "device", "key", "size")
    address: int
    device: int
    key: int
    size: int


#: The blocks of this process, by ``_cdata`` of their storages; :func:`install` sets the former.
memory: Memory
leases: dict[int, Lease] = {}


def new(shape: Any, stride: Any, dtype: torch.dtype, size: int, device: torch.device) -> Tensor:
    """A tensor on a new storage of ``size`` bytes.

    Raises:
        torch.OutOfMemoryError: the device has no room.
    """
    shell = _shell(_Shell, shape, stride, dtype=dtype, device=device, storage_size=size)
    made: Tensor = _alias(_EXPLICIT, shell)
    memory.allocate(made.untyped_storage(), size, device)
    return made


def below() -> Any:
    """A context in which an operator that touches no memory is called: a view, or another geometry
    for its argument."""
    return _Guard(_META, _EXCLUDED)


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no contents."""
    return address_of_storage(tensor) in leases


def _storage_pointer(storage: torch.UntypedStorage) -> int:
    lease = leases.get(storage._cdata)
    return _plain_data_ptr(storage) if lease is None else lease.address


def _pointer(tensor: Tensor) -> int:
    lease = leases.get(tensor.untyped_storage()._cdata)
    if lease is None:
        return _tensor_data_ptr(tensor)
    return lease.address + int(tensor.storage_offset()) * tensor.element_size()


def _shown(tensor: Tensor, *, tensor_contents: Any = None) -> str:
    """As PyTorch shows meta tensors: it switches every mode off to read the contents of others."""
    if tensor.layout == torch.strided and is_fake(tensor) and tensor_contents is None:
        of = f"device='{tensor.device}', size={tuple(tensor.shape)}, dtype={tensor.dtype}"
        return f"tensor(..., {of})"
    return _tensor_shown(tensor, tensor_contents=tensor_contents)


def install(found: Memory) -> None:
    """Have fake tensors lie in ``found``."""
    global memory
    memory = found
    torch._tensor_str._str = _shown
    torch.UntypedStorage.data_ptr = _storage_pointer  # type: ignore[method-assign, assignment]
    Tensor.data_ptr = _pointer  # type: ignore[method-assign, assignment]
