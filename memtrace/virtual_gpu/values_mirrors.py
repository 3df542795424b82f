"""Contents of device storages, kept on the host for as long as every byte can be known.

A mirror belongs to a storage, not to a tensor, so views, aliases and in-place operators act on it
as on the original. What was overwritten with something unknown is a hole in it; a later write of
something known closes the hole. Mirrors die with their storages.
"""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

#: Storages up to this many bytes are mirrored. Token ids, positions, lengths and masks decide what
#: a program does, and 2 MiB are a quarter of a million of them. Floating-point data seldom does: 1
#: MiB is a score in float32 for each entry of a vocabulary as large.
LIMIT_INTEGERS = 2 << 20
LIMIT_FLOATS = 1 << 20

#: A view of a small storage can have any number of elements; more than these count as unknown.
ELEMENTS = 2 << 20

#: The address of a tensor's storage, without making a Python object of that.
address: Callable[[Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]

#: What a tensor raises that doesn't lie on a storage as others do: nested, quantized, opaque.
_UNUSUAL = (RuntimeError, ValueError, TypeError)


class Mirror:
    """The bytes of one storage on the host, and which of them aren't known."""

    __slots__ = ("chosen", "holes", "ref", "storage")

    def __init__(self, storage: torch.UntypedStorage, ref: weakref.ref) -> None:
        self.storage = storage
        self.ref = ref
        self.holes: Tensor | None = None  # one byte for each of the storage's, 1: not known
        self.chosen = False  # holds what was drawn from unknown probabilities


class Mirrors:
    """Every mirror of this process. ``of`` is keyed by the address of the storage."""

    def __init__(self) -> None:
        self.of: dict[int, Mirror] = {}
        self.bytes = 0
        self.peak_bytes = 0

    def value(self, tensor: Tensor) -> Tensor | None:
        """A host tensor with the geometry and the contents of ``tensor``; None: not known."""
        try:
            mirror = self._find(tensor)
            if mirror is None:
                nothing = torch.UntypedStorage(0, device="cpu")
                return _geometry(nothing, tensor) if tensor.numel() == 0 else None
            if tensor.numel() > ELEMENTS or (
                mirror.holes is not None and _spots(mirror.holes, tensor).any()
            ):
                return None
            return _geometry(mirror.storage, tensor)
        except _UNUSUAL:
            return None

    def target(self, tensor: Tensor) -> Tensor | None:
        """As :meth:`value`, but to write into: what it holds need not be known."""
        try:
            if tensor.numel() > ELEMENTS:
                return None
            mirror = self._find(tensor)
            if mirror is None:
                mirror = self._new(tensor)
                if mirror is None:
                    return None
                mirror.holes = _holes(mirror, 1)
            return _geometry(mirror.storage, tensor)
        except _UNUSUAL:
            return None

    def wrote(self, tensor: Tensor, *, known: bool) -> None:
        """``tensor`` was overwritten on the device; ``known``: and in its mirror too."""
        try:
            mirror = self._find(tensor)
            if mirror is None:
                return
            mirror.chosen = False
            if _covers(tensor):
                mirror.holes = None
                if not known:
                    self.drop(address(tensor))
            elif not known or mirror.holes is not None:
                mirror.holes = _holes(mirror, 0) if mirror.holes is None else mirror.holes
                _spots(mirror.holes, tensor).fill_(not known)
        except _UNUSUAL:
            self.drop(address(tensor))

    def bind(self, tensor: Tensor, value: Tensor, *, chosen: bool = False) -> None:
        """The new ``tensor`` holds ``value``. One on a storage with a mirror is left as it is."""
        if (
            tensor.layout != torch.strided
            or tensor.dtype != value.dtype
            or tensor.shape != value.shape
            or address(tensor) in self.of
            or not 0 < value.numel() <= ELEMENTS
        ):
            return
        try:
            mirror = self._new(tensor)
            if mirror is None:
                return
            mirror.chosen = chosen
            if not _covers(tensor):
                mirror.holes = _holes(mirror, 1)
                _spots(mirror.holes, tensor).fill_(0)
            _geometry(mirror.storage, tensor).copy_(value)
        except _UNUSUAL:
            self.drop(address(tensor))

    def fill(self, tensor: Tensor, number: complex) -> None:
        """The new ``tensor`` holds one number throughout."""
        one = torch.tensor(number, device="cpu").to(tensor.dtype)
        self.bind(tensor, one.expand(tensor.shape))

    def chosen(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a placeholder for what is drawn from unknown probabilities."""
        mirror = self._find(tensor)
        return mirror is not None and mirror.chosen

    def drop(self, key: int) -> None:
        """Nothing is known of the storage at this address any more."""
        mirror = self.of.pop(key, None)
        if mirror is not None:
            self.bytes -= mirror.storage.nbytes()

    def _find(self, tensor: Tensor) -> Mirror | None:
        try:
            key = address(tensor)
        except RuntimeError:  # sparse
            return None
        mirror = self.of.get(key)
        if mirror is not None and mirror.storage.nbytes() != tensor.untyped_storage().nbytes():
            self.drop(key)  # resized since
            return None
        return mirror

    def _new(self, tensor: Tensor) -> Mirror | None:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if not fits(tensor, size) or not tensor.is_cuda:
            return None
        key = storage._cdata
        mirror = Mirror(
            torch.UntypedStorage(size, device="cpu"),
            weakref.ref(storage, lambda ref: self._died(key, ref)),
        )
        self.drop(key)
        self.of[key] = mirror
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return mirror

    def _died(self, key: int, ref: weakref.ref) -> None:
        mirror = self.of.get(key)
        if mirror is not None and mirror.ref is ref:
            self.drop(key)


def fits(tensor: Tensor, size: int) -> bool:
    """Whether a storage of ``size`` bytes that ``tensor`` lies on is mirrored."""
    floats = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return 0 < size <= (LIMIT_FLOATS if floats else LIMIT_INTEGERS)


def _geometry(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """A tensor on a host storage that lies there as ``like`` lies on its own."""
    view = torch.empty(0, dtype=like.dtype, device="cpu")
    view.set_(storage, like.storage_offset(), like.shape, like.stride())
    if like.is_conj():
        view = torch._conj(view)
    if like.is_neg():
        view = torch._neg_view(view)
    return view


def _spots(holes: Tensor, tensor: Tensor) -> Tensor:
    """The bytes of ``tensor`` among those of its storage."""
    size = tensor.element_size()
    strides = [step * size for step in tensor.stride()]
    return holes.as_strided((*tensor.shape, size), (*strides, 1), tensor.storage_offset() * size)


def _holes(mirror: Mirror, hole: int) -> Tensor:
    return torch.full((mirror.storage.nbytes(),), hole, dtype=torch.uint8, device="cpu")


def _covers(tensor: Tensor) -> bool:
    """Whether every byte of the storage belongs to ``tensor``."""
    size = tensor.numel() * tensor.element_size()
    return (
        size == tensor.untyped_storage().nbytes() and torch._debug_has_internal_overlap(tensor) == 0
    )
