"""Which block is the workspace of cuBLAS.

PyTorch allocates it inside the first matrix product of each thread and stream and keeps it (until
torch 2.14; from 2.15 on around each product). No entry of the allocator's history says so, and its
size is that of many a tensor. So a dispatch mode watches a thread up to its first product on CUDA:
what that allocates is ``backend``, but for what it returns.
"""

import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memtrace.allocator.metadata import birth_text, born_text
from memtrace.record.ledger import Frame, Ledger
from memtrace.record.mode import Mode

if TYPE_CHECKING:
    from memtrace.record.cuda import CudaSource

#: pytest shows the program's frames, not ours.
__tracebackhide__ = True

_PRODUCTS = {
    f"aten::{name}"
    for name in (
        *("linear", "matmul", "mm", "bmm", "mv", "dot", "addmm", "addbmm", "baddbmm", "addmv"),
        *("_addmm_activation", "_scaled_mm", "_grouped_mm", "_int_mm", "einsum", "tensordot"),
    )
}


class FirstProduct(Mode):
    """Watches one thread until its first matrix product on CUDA."""

    def __init__(self, source: "CudaSource", ledger: Ledger, place: ContextVar[Frame]) -> None:
        super().__init__()
        self._source = source
        self._ledger = ledger
        self._place = place
        self._working = False
        #: Whether there is nothing left to see.
        self.over = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        source = self._source
        if not self._working:
            self._working = True
            source.working.add(threading.current_thread())
        if source.due:
            source.drain()
        name = func._schema.name if isinstance(func, torch._ops.OpOverload) else ""
        if self.over or name not in _PRODUCTS or not _on_cuda(args):
            return func(*args, **(kwargs or {}))
        self.over = True
        frame = self._place.get()
        path = [*self._ledger.path(frame.scope), ("op", str(func))]
        source.announce(birth_text("backend", path))
        try:
            out = func(*args, **(kwargs or {}))
        finally:
            source.announce(frame.text)
        if isinstance(out, Tensor) and out.is_cuda:
            source.annotate(out.untyped_storage().data_ptr(), born_text(frame.component, path))
        return out


def _on_cuda(args: Any) -> bool:
    return any(isinstance(one, Tensor) and one.is_cuda for one in args)
