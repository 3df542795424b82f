"""What CUB asks for, which sorts, scans and selects for PyTorch: the temporary storage of its
algorithms, in bytes.

Formulas are those of CCCL 3.0. Sorts: ``cub/device/dispatch/dispatch_radix_sort.cuh``, with the
tile sizes of ``tuning/tuning_radix_sort.cuh`` for values of 8 bytes and offsets of 64 bits, as
PyTorch calls it (``aten/src/ATen/cuda/cub.cu``). Scans and selections: ``dispatch_scan.cuh`` and
``dispatch_select_if.cuh`` beside it, with the state of their tiles
(``agent/single_pass_scan_operators.cuh``); sums: ``dispatch_reduce.cuh``. How many blocks a
processor takes follows from its threads alone, as on the virtual GPU: how many registers a kernel
needs is known to no host code.
"""

from memtrace.devices import Device

_ALIGNMENT = 256  # of each part of a temporary storage, and of its beginning
_DIGITS = 256
#: Items up to which one set of offsets serves.
_PORTION = (1 << 28) - 1

#: Items of a tile of onesweep by bytes of a key, on compute capability 9.0 and above; of keys alone
#: last.
_TILES_90 = {1: 384 * 9, 2: 512 * 11, 4: 384 * 14, 8: 384 * 12}
_TILE_90_KEYS = 384 * 15
#: The same before it, where keys of less than 4 bytes are sorted otherwise.
_TILES_80 = {4: 384 * 8, 8: 384 * 10}
_TILE_80_KEYS = 384 * 10

#: ``Policy800``: blocks for each that a processor holds, and places in the scan of their counts.
_SUBSCRIPTION, _SCANNED = 5, 512 * 11

#: ``Policy600`` of sums and scans.
_REDUCE_THREADS, _REDUCE_ITEMS = 256, 16
_SCAN_THREADS, _SCAN_ITEMS = 128, 15
_WARP = 32
#: Places of a tile of a selection; on compute capability 8.0; on 9.0.
_SELECT, _SELECT_80, _SELECT_90 = 128 * 5, 384 * 6, 384 * 11


def radix_sort_pairs(count: int, key: int, card: Device) -> int:
    """To sort keys of ``key`` bytes with values of 8, neither overwritten."""
    new = card.capability >= (9, 0)
    copies = (count * key, count * 8)
    if not new and key < 4:
        threads, digits = (128, 32) if key == 1 else (256, 128)
        held = min(card.threads_per_processor // threads, card.blocks_per_processor)
        blocks = held * card.processors * _SUBSCRIPTION
        return _storage(8 * (blocks * digits + _SCANNED), *copies)
    tile = (_TILES_90 if new else _TILES_80)[key]
    return _onesweep(count, tile, key, copies if key > 1 else ())


def radix_sort_keys(count: int, card: Device) -> int:
    """To sort keys of 8 bytes by up to 8 of their bits."""
    return _onesweep(count, _TILE_90_KEYS if card.capability >= (9, 0) else _TILE_80_KEYS, 1, ())


def segmented_sort_pairs(count: int, key: int) -> int:
    """To sort many segments of keys with values of 8 bytes, neither overwritten."""
    return _storage(count * key, count * 8)


def _onesweep(count: int, tile: int, passes: int, copies: tuple[int, ...]) -> int:
    """``InvokeOnesweep``: a pass for each byte that is sorted by."""
    portion = _PORTION // tile * tile
    rounds = passes * -(-count // portion)
    blocks = -(-min(count, portion) // tile)
    return _storage(8 * rounds * _DIGITS, 4 * blocks * _DIGITS, *copies, 4 * rounds)


def scan(count: int, value: int, *, primitive: bool) -> int:
    """To scan values of ``value`` bytes by an operator that CUB has no tuning for, as all of
    PyTorch's are; ``primitive``: C++ has the type."""
    items = max(1, min(_SCAN_ITEMS * 4 // value, 2 * _SCAN_ITEMS))
    tiles = -(-count // (_SCAN_THREADS * items))
    return _storage(_tile_states(tiles, value, primitive))


def select(count: int, card: Device) -> int:
    """To select among places of 8 bytes by flags; the tile sizes of ``tuning_select_if.cuh``."""
    tile = _SELECT_90 if card.capability >= (9, 0) else _SELECT
    if card.capability == (8, 0):
        tile = _SELECT_80
    return _storage(_tile_states(-(-count // tile), 4, True))


def count_flags(count: int, card: Device) -> int:
    """To add flags up to a number of 4 bytes."""
    if count <= _REDUCE_THREADS * _REDUCE_ITEMS:
        return 1
    held = min(card.threads_per_processor // _REDUCE_THREADS, card.blocks_per_processor)
    return _storage(4 * held * card.processors * _SUBSCRIPTION)


def _tile_states(tiles: int, value: int, primitive: bool) -> int:
    """``tile_state_allocation_size``: a status and a value of each tile in one word, or apart and
    two values."""
    states = tiles + _WARP
    if primitive:
        return _storage(2 * value * states)
    return _storage(4 * states, value * states, value * states)


def _storage(*parts: int) -> int:
    """``AliasTemporaries``: each part is aligned, and so is the first."""
    return sum(-(-one // _ALIGNMENT) * _ALIGNMENT for one in parts) + _ALIGNMENT - 1
