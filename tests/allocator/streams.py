"""Random streams of operations on an allocator, in the format of golden vectors."""

import random
from collections.abc import Callable
from typing import Any

from memtrace.allocator.settings import NEWEST, Version

MIB = 1 << 20

#: Values of each setting, and since which version it exists.
_SETTINGS: dict[str, tuple[Version, tuple[str, ...]]] = {
    "large_segment_size_mb": ((2, 11), ("11", "20", "64", "128")),
    "max_split_size_mb": ((2, 1), ("128", "200")),
    "max_non_split_rounding_mb": ((2, 1), ("128", "300")),
    "roundup_power2_divisions": ((2, 1), ("2", "4", "16", "[1:4,8:2,>:8]")),
    "garbage_collection_threshold": ((2, 1), ("0.2", "0.5", "0.9")),
    "expandable_segments": ((2, 1), ("True",)),
    "throw_on_cudamalloc_oom": ((2, 12), ("True",)),
    "per_process_memory_fraction": ((2, 10), ("0.4", "0.8")),
}
_TOTALS = (200 * MIB, 300 * MIB, 1500 * MIB, 60 << 30)


def random_settings(draw: random.Random, torch: Version = NEWEST) -> str:
    """A settings string that the version accepts."""
    known = [key for key, (since, _) in _SETTINGS.items() if since <= torch]
    chosen = draw.sample(known, draw.choice((0, 1, 1, 2, 3)))
    values = {key: draw.choice(_SETTINGS[key][1]) for key in chosen}
    if "expandable_segments" in values and values.get("large_segment_size_mb") == "11":
        values["large_segment_size_mb"] = "12"  # pages of an odd size can't be mapped
    return ",".join(f"{key}:{value}" for key, value in values.items())


def random_case(seed: int, torch: Version = NEWEST, length: int = 150) -> dict[str, Any]:
    """A vector without what an allocator answered; the same for the same seed."""
    draw = random.Random(seed)
    settings = random_settings(draw, torch)
    case = {
        "settings": settings,
        "total_memory": draw.choice(_TOTALS),
        "used_outside": draw.choice((0, 0, 64 * MIB)),
        "memory_fraction": draw.choice((None, None, 0.5, 0.9, 1.0)),
        "completion": draw.choice(("soon", "late")),
        "ops": random_ops(draw, length),
    }
    # Here the allocator gives segments back without waiting for its streams; but cudaFree waits.
    frees = "garbage_collection" in settings or "max_split_size" in settings
    if frees or any(op[0] == "x" for op in case["ops"]):
        case["completion"] = "soon"
    return case


def random_ops(draw: random.Random, length: int) -> list[list[Any]]:
    """Allocations and frees on up to four streams and in private pools, and what goes with them."""
    return _Maker(draw).make(length)


class _Maker:
    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.streams = draw.choice((1, 1, 2, 4))
        self.ops: list[list[Any]] = []
        self.live: list[tuple[int, int]] = []  # of (number, stream)
        self.scopes: list[int] = []
        self.pools: dict[int, int] = {}  # users of each
        self.made = self.made_pools = 0
        # More of one kind of size in one stream of operations than in another.
        self.largest = draw.choice((2, 20, 60, 150)) * MIB
        shares: dict[Callable[[], None], float] = {
            self.allocate: 50,
            self.free: draw.choice((25, 40, 48)),
            self.empty: draw.choice((0, 1, 4)),
            self.reset: 1,
        }
        if self.streams > 1:
            shares[self.record] = draw.choice((0, 10))
        if draw.random() < 0.4:
            shares |= {self.begin: 3, self.end: 3, self.release: 2}
        self.steps, self.weights = list(shares), list(shares.values())

    def make(self, length: int) -> list[list[Any]]:
        while len(self.ops) < length:
            self.draw.choices(self.steps, self.weights)[0]()
        return self.ops

    def allocate(self) -> None:
        size = self.draw.choice(
            (
                self.draw.randint(1, 4096),
                self.draw.randint(1, MIB),
                self.draw.randint(1, 12 * MIB),
                self.draw.randint(1, self.largest),
                # Blocks of one size are what ties are broken between.
                self.draw.choice((512, MIB, 2 * MIB, 10 * MIB, self.largest)),
            )
        )
        stream = self.draw.randrange(self.streams)
        self.made += 1
        self.ops.append(["a", self.made, size, stream])
        self.live.append((self.made, stream))

    def free(self) -> None:
        if self.live:
            number, _ = self.live.pop(self.draw.randrange(len(self.live)))
            self.ops.append(["f", number])

    def empty(self) -> None:
        self.ops.append(["e"])

    def reset(self) -> None:
        self.ops.append([self.draw.choice("pA")])

    def record(self) -> None:
        if self.live:
            number, _ = self.draw.choice(self.live)
            self.ops.append(["r", number, self.draw.randrange(self.streams)])

    def begin(self) -> None:
        if len(self.scopes) < 2:
            closed = [pool for pool in self.pools if pool not in self.scopes]
            if closed and self.draw.random() < 0.5:
                pool = self.draw.choice(closed)
            else:
                self.made_pools += 1
                pool = self.made_pools
            self.pools[pool] = self.pools.get(pool, 0) + 1
            self.scopes.append(pool)
            self.ops.append(["b", pool])

    def end(self) -> None:
        if self.scopes:
            self.ops.append(["d", self.scopes.pop()])

    def release(self) -> None:
        closed = [pool for pool in self.pools if pool not in self.scopes]
        if closed:
            pool = self.draw.choice(closed)
            self.ops.append(["x", pool])
            self.pools[pool] -= 1
            if self.pools[pool] == 0:
                del self.pools[pool]
                # It was a MemPool, which ends; up to torch 2.12 that fails where a scope is open.
                if pool % 2 and not self.scopes:
                    self.ops.append(["e", pool])


def random_text(draw: random.Random) -> str:
    """A settings string as people mistype them; PyTorch takes about a third."""
    chosen = draw.sample(list(_VALUES), draw.randint(1, 3))
    text = ",".join(f"{key}:{draw.choice(_VALUES[key])}" for key in chosen)
    if draw.random() < 0.1:
        text = text[: draw.randint(0, len(text))]
    if draw.random() < 0.1:
        place = draw.randint(0, len(text))
        text = text[:place] + draw.choice(",:[] ") + text[place:]
    return text


_VALUES: dict[str, tuple[str, ...]] = {
    "max_split_size_mb": ("20", "21", "19", "200", "30x", "1e3", "-1", "+25", "0x30", ""),
    "max_non_split_rounding_mb": ("20", "30", "10", "300"),
    "large_segment_size_mb": ("20", "11", "10", "30", "64"),
    "garbage_collection_threshold": ("0.5", "1", "0", ".3", "-0.5", "1e-3", "x", "nan"),
    "expandable_segments": ("True", "False", "true", "1"),
    "per_process_memory_fraction": ("0", "1", "0.5", "1.1"),
    "pinned_num_register_threads": ("1", "3", "256"),
    "nonsense": ("1",),
    "roundup_power2_divisions": (
        *("2", "16", "0", "3", "x"),
        *("[256:1,512:2,1024:4,>:8]", "[1:8]", "[>:4]", "[]", "[64:2,>:8,512:4]", "[65536:2]"),
        *("[3:2]", "[256:3]", "[256:1,]", "[256:1", "[2:0,131072:4]", "[>:1,>:2]"),
    ),
}
