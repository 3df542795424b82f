"""What holds of an allocator's blocks at any time, whatever a program asks."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from memtrace.allocator.settings import MIN_BLOCK

if TYPE_CHECKING:
    from memtrace.allocator.pools import Block, Pool


class InvariantError(AssertionError):
    """The simulator is wrong: one sentence says where."""


def segments_of(pools: Iterable["Pool"], taken: Iterable["Block"]) -> list[list["Block"]]:
    """All blocks by segment, each in the order of addresses: those in pools and those taken.

    Raises:
        InvariantError: a segment has a block that is in no pool nor taken, or one is there twice.
    """
    blocks = list(taken)
    for pool in pools:
        blocks += pool
        blocks += (block for found in pool.unmapped.values() for _, block in found)
    known = set(map(id, blocks))
    _must(len(known) == len(blocks), "a block is in two places")
    segments = []
    for head in sorted(blocks, key=lambda block: block.address):
        if head.prev is None:
            segments.append([head])
            while (following := segments[-1][-1].next) is not None:
                segments[-1].append(following)
                _must(id(following) in known, f"nobody has {_name(following)}")
                known.remove(id(following))
            known.remove(id(head))
    _must(not known, "a block is in no segment")
    return segments


def check_pool(pool: "Pool") -> None:
    """What waits in a pool is free, is the pool's, and stands in the order of the search.

    Raises:
        InvariantError: otherwise.
    """
    for stream, entries in pool.free.items():
        for *key, block in entries:
            same = key == [block.size, block.order, block.address]
            _must(same, f"{_name(block)} waits under another key")
            _must(block.is_free and block.mapped, f"{_name(block)} waits and is not free")
            _must(block.stream == stream and block.pool is pool, f"{_name(block)} waits elsewhere")
        _must(_ascending([entry[:3] for entry in entries]), f"pool {pool.number} is not sorted")
    for stream, addresses in pool.unmapped.items():
        for address, block in addresses:
            _must(address == block.address, f"{_name(block)} waits under another address")
            _must(block.is_free and not block.mapped, f"{_name(block)} waits and is mapped")
            _must(block.stream == stream and block.pool is pool, f"{_name(block)} waits elsewhere")
        _must(_ascending([entry[:1] for entry in addresses]), f"pool {pool.number} is not sorted")


def check_segment(blocks: Sequence["Block"]) -> None:
    """Blocks tile their segment, and free neighbours are one block.

    Raises:
        InvariantError: otherwise.
    """
    for block in blocks:
        whole = block.size > 0 and block.size % MIN_BLOCK == 0
        _must(whole, f"{_name(block)} has no size that a block can have")
        if block.allocated:
            _must(0 < block.requested <= block.size, f"{_name(block)} is less than was asked for")
    for left, right in pairwise(blocks):
        _must(right.prev is left, f"{_name(right)} doesn't know what is before it")
        _must(left.address + left.size == right.address, f"a gap follows {_name(left)}")
        same = (left.segment, left.stream, left.pool) == (right.segment, right.stream, right.pool)
        _must(same, f"{_name(right)} is of another segment than what is before it")
        merged = not (left.is_free and right.is_free and left.mapped == right.mapped)
        _must(merged, f"{_name(left)} and the block after it are both free")
    first = blocks[0]
    if first.segment is not None:
        _must(first.address == first.segment.address, f"{_name(first)} begins no segment")
        mapped = sum(block.size for block in blocks if block.mapped)
        _must(mapped % first.segment.page == 0, f"the segment of {_name(first)} has part of a page")


def check_equal(name: str, counted: int, found: int) -> None:
    """A counter is what the blocks say.

    Raises:
        InvariantError: otherwise.
    """
    _must(counted == found, f"{name} is counted as {counted:,}, and the blocks say {found:,}")


def _ascending(keys: Sequence[tuple[int, ...]]) -> bool:
    return all(left < right for left, right in pairwise(keys))


def _must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InvariantError(otherwise)


def _name(block: "Block") -> str:
    return f"the block of {block.size:,} bytes at 0x{block.address:x}"
