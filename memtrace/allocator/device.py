"""The memory of a device, as far as an allocator can tell: whether there is some, and where."""

from memtrace.allocator.settings import MiB

#: What cudaMalloc hands out is made of such pages.
PAGE = 2 * MiB
#: Where addresses begin. Which ones a driver hands out isn't documented; ours go upwards and are
#: never used again, which is what ties are broken by up to torch 2.11.
FIRST_ADDRESS = 0x7F0000000000
FIRST_RESERVED = 0x300000000
_GiB = 1 << 30


class Device:
    """Memory of ``total`` bytes, of which ``outside`` is used by others than the allocator."""

    def __init__(self, total: int, outside: int = 0) -> None:
        self.total = total
        self.free_bytes = total - outside
        self._next = FIRST_ADDRESS
        self._next_reserved = FIRST_RESERVED

    def malloc(self, size: int) -> int | None:
        """The address of a new segment; None: there is too little memory."""
        bytes_taken = (size + PAGE - 1) // PAGE * PAGE
        if bytes_taken > self.free_bytes:
            return None
        self.free_bytes -= bytes_taken
        address = self._next
        self._next += bytes_taken
        return address

    def free(self, address: int, size: int) -> None:
        """A segment comes back."""
        self.free_bytes += (size + PAGE - 1) // PAGE * PAGE

    def reserve(self, size: int) -> int:
        """Addresses without memory, for an expandable segment."""
        address = self._next_reserved
        self._next_reserved += (size // _GiB + 1) * _GiB
        return address

    def unreserve(self, address: int, size: int) -> None:
        """The addresses of an expandable segment without memory come back."""

    def map(self, size: int, page: int) -> bool:
        """Put memory behind addresses: all of it or nothing."""
        if size > self.free_bytes:
            return False
        self.free_bytes -= size
        return True

    def unmap(self, size: int) -> None:
        """Pages come back."""
        self.free_bytes += size
