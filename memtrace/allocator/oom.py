"""An allocation that failed: what PyTorch says of it, from what the allocator knew."""

from dataclasses import dataclass

from memtrace.allocator.settings import NEWEST, Version

_ADVICE = (
    " If reserved but unallocated memory is large try setting"
    " {}=expandable_segments:True to avoid fragmentation.  See documentation"
    " for Memory Management  "
)
_PAGE = (
    "(https://docs.pytorch.org/docs/stable/notes/cuda.html"
    "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
)
_OLD_PAGE = "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
_ADVICE_ON_ADDRESSES = (
    " expandable_segments is enabled. If instead the process is running out of virtual address"
    " space (VSZ), expandable segments may be over-reserving VA (each segment reserves ~9/8 of"
    " device memory, times the number of streams); reduce it via PYTORCH_CUDA_ALLOC_CONF"
    " expandable_segments_reserve / expandable_segments_reserve_by_class."
)


@dataclass(frozen=True)
class Failure:
    """The allocator's state when it gave up; sizes in bytes.

    Attributes:
        requested: what the caller asked for.
        wanted: what the device was asked for: what PyTorch's message calls the attempt.
        total: memory of the device.
        free: of that, what nobody uses.
        allowed: what the memory fraction allows; None where none is set.
        allocated: in blocks that are allocated.
        reserved: in segments.
        private: free in private pools, which PyTorch counts as allocated.
        rejected: nothing was tried, by ``throw_on_cudamalloc_oom``.
        expandable: segments are expandable; newer versions don't advise it then.
        reserve: addresses of an expandable segment; None where no setting limits them.
        torch: whose words.
    """

    requested: int
    wanted: int
    total: int
    free: int
    allowed: int | None
    allocated: int
    reserved: int
    private: int
    rejected: bool = False
    expandable: bool = False
    reserve: int | None = None
    torch: Version = NEWEST

    def message(self, device: int = 0, process: int | None = None) -> str:
        """What ``torch.cuda.OutOfMemoryError`` says; ``process``: bytes that the process uses,
        where the driver tells."""
        if self.rejected:
            return (
                "CUDA out of memory. Allocation was preemptively rejected because it would exceed"
                f" per_process_memory_fraction limit. Requested size: {_size(self.requested)}"
            )
        used = (
            ""
            if process is None
            else (
                f"Including non-PyTorch memory, this process has {_size(process)} memory in use. "
            )
        )
        allowed = "" if self.allowed is None else f"{_size(self.allowed)} allowed; "
        private = (
            ""
            if not self.private
            else (f"with {_size(self.private)} allocated in private pools (e.g., CUDA Graphs), ")
        )
        return (
            f"CUDA out of memory. Tried to allocate {_size(self.wanted)}."
            f" GPU {device} has a total capacity of {_size(self.total)}"
            f" of which {_size(self.free)} is free. {used}{allowed}Of the allocated memory"
            f" {_size(self.allocated + self.private)} is allocated by PyTorch, {private}and"
            f" {_size(self.reserved - self.allocated - self.private)}"
            f" is reserved by PyTorch but unallocated.{self._advice()}"
        )

    def _advice(self) -> str:
        reserve = self.reserve if self.expandable else None
        if reserve is not None and reserve < self.wanted <= self.total:
            return (
                f" This allocation exceeds the expandable-segment reserve of {_size(reserve)}"
                " for this stream, and a single allocation cannot span expandable segments. Raise"
                " PYTORCH_CUDA_ALLOC_CONF expandable_segments_reserve or"
                " expandable_segments_reserve_by_class (or unset it) so that a segment is at least"
                f" {_size(self.wanted)}."
            )
        if self.expandable and self.torch >= (2, 15):
            return _ADVICE_ON_ADDRESSES
        if self.expandable and self.torch >= (2, 14):
            return ""
        variable = "PYTORCH_ALLOC_CONF" if self.torch == (2, 10) else "PYTORCH_CUDA_ALLOC_CONF"
        return _ADVICE.format(variable) + (_PAGE if self.torch >= (2, 11) else _OLD_PAGE)


class OutOfMemory(Exception):
    """What :class:`~memtrace.allocator.native.NativeAllocator` raises where PyTorch would."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message())
        self.failure = failure


def _size(size: int) -> str:
    """As PyTorch writes sizes."""
    if size <= 1 << 10:
        return f"{size} bytes"
    for unit, scale in (("KiB", 1 << 10), ("MiB", 1 << 20)):
        if size <= scale << 10:
            return f"{size / scale:.2f} {unit}"
    return f"{size / (1 << 30):.2f} GiB"
