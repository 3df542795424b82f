"""``backend:cudaMallocAsync``: bounds, since the driver's pool isn't documented.

PyTorch passes each request on as it is. What the pool reserves, which freed memory another stream
gets, and what is remapped is up to the driver and to how far the GPU has come. Known are the live
bytes, and that the pool grows in pieces of 32 MiB (measured by others on one driver: an assumption
here). Nothing in here is more than a bound.
"""

from dataclasses import dataclass

import numpy as np

from memtrace.allocator.ops import Op
from memtrace.allocator.requests import Requests
from memtrace.allocator.settings import MiB
from memtrace.allocator.simulation import Setup

_PIECE = 32 * MiB


@dataclass(frozen=True)
class Bounds:
    """What the pool takes at its peak, in bytes.

    Attributes:
        requested_peak: the most that lived at a time, as it was asked for. Exact.
        least: the pool reserves at least this.
        most: and at most this, if no stream gets what another one freed and the driver wastes
            nothing on fragmentation, which it remaps.
        fits: whether it fits the device; None: it may.
    """

    requested_peak: int
    least: int
    most: int
    fits: bool | None


def bounds(requests: Requests, setup: Setup) -> Bounds:
    """Bounds for the requests on ``setup``'s device."""
    ops = requests.ops
    blocks = int(ops.block.max(initial=-1)) + 1
    sizes = np.zeros(blocks, dtype=np.int64)
    streams = np.zeros(blocks, dtype=np.int64)
    born = ops.kind == Op.ALLOC
    sizes[ops.block[born]] = ops.size[born]
    streams[ops.block[born]] = ops.stream[born]
    # What waits for another stream isn't free before that.
    gone = (ops.kind == Op.FREE) | (ops.kind == Op.COMPLETE)
    change = np.where(born | gone, sizes[ops.block], 0) * np.where(gone, -1, 1)
    stream = streams[ops.block]
    by_stream = sum(_peak(change[stream == one]) for one in requests.streams)
    requested = _exact_peak(change)
    least, most = _in_pieces(requested), max(by_stream, _in_pieces(requested))
    room = min(setup.total - setup.outside, setup.pool or setup.total)
    fraction = setup.settings.fraction if setup.fraction is None else setup.fraction
    fits: bool | None = None
    if requested > min(room, int(fraction * setup.total)):
        fits = False
    elif most <= room:
        fits = True
    return Bounds(requested, least, most, fits)


def _exact_peak(change: np.ndarray) -> int:
    return int(np.cumsum(change).max(initial=0))


def _peak(change: np.ndarray) -> int:
    return _in_pieces(_exact_peak(change))


def _in_pieces(size: int) -> int:
    return -(-size // _PIECE) * _PIECE
