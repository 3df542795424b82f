"""What ``tidekv tables --persistent`` does: the paper's study of a server that stays.

Two schedules under two allocators answer the same requests, each configuration in one process of
its own on a virtual card, under ``memtrace record --source none``; ``memtrace stability`` judges
them. Nothing here reads a trace itself.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memtrace.allocator.settings import environment_of
from memtrace.sizes import format_size
from tidekv import workloads
from tidekv.errors import TidekvError

#: One cycle of the mix, that of traces/mixed-150.jsonl.
LENGTHS = (1024, 4096, 8192, 16384, 32768, 65536, 131072)
NEW_TOKENS = 2

#: In pieces larger than the paper's and than the defaults: 5.5 million tokens are read, and each
#: operator takes the host a moment.
_TIDEKV = ("--chunk-size", "16384", "--schedule-option", "piece_rows=16384")
_SCORING = ("--selector-option", "block_size=32768")
_METHODS = {
    "SnapKV": ("--schedule", "whole_prompt"),
    "TideKV": ("--schedule", "layer_major", *_TIDEKV),
}
_ALLOCATORS = {"native": "backend:native", "async": "backend:cudaMallocAsync"}

#: Table 5b: 4 × 150 requests, all completed; slopes about 0; from the first to the last cycle 0
#: MiB. The rest it gives for the native allocator only, in GiB and in number.
_PAPER = {"SnapKV": (7.234, 1), "TideKV": (1.326, 0)}


@dataclass(frozen=True)
class Configuration:
    """One configuration's verdict; bytes where nothing else is said, None: the allocator has none.

    Attributes:
        slope: of reserved bytes, a request; ``interval``: its 95 % confidence interval.
        change: of reserved bytes from the first to the last cycle after the warm-up.
        inactive_split: at most at any time.
        retries: in all, the warm-up included.
        cpu_seconds: what its processes took, start and end included.
    """

    allocator: str
    method: str
    requests: int
    answered: int
    verdict: str
    slope: float | None
    interval: tuple[float | None, float | None] | None
    change: int | None
    allocated_peak: int | None
    reserved_peak: int | None
    inactive_split: int | None
    retries: int | None
    cpu_seconds: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def run(
    workload: Path | None,
    *,
    card: str,
    requests: int,
    output: Path | None,
    done: Callable[[], object] = lambda: None,
) -> list[Configuration]:
    """Run every configuration.

    Args:
        workload: a .jsonl file; None: :data:`LENGTHS` in cycles.
        card: of ``memtrace devices``.
        requests: the first so many.
        output: folder to keep the runs in; None: they are thrown away.
        done: called after each request.

    Raises:
        TidekvError: no virtual card can be had, or a configuration's process failed.
    """
    with tempfile.TemporaryDirectory(prefix="tidekv-") as scratch:
        file = workload
        if file is None:
            file = Path(scratch) / "mixed.jsonl"
            workloads.save(workloads.mixed(LENGTHS, requests, NEW_TOKENS), file)
        folder = Path(scratch) if output is None else output
        folder.mkdir(parents=True, exist_ok=True)
        return [
            _run(allocator, method, file, card, requests, folder, done)
            for allocator in _ALLOCATORS
            for method in _METHODS
        ]


def _run(
    allocator: str,
    method: str,
    workload: Path,
    card: str,
    requests: int,
    folder: Path,
    done: Callable[[], object],
) -> Configuration:
    run = folder / f"{method.lower()}-{allocator}.memtrace"
    start = _cpu_seconds()
    command = [
        *(sys.executable, "-m", "memtrace", "record", "-q", "--source", "none"),
        *("--virtual-gpu", card, "-o", str(run), "--"),
        *(sys.executable, "-m", "tidekv", "serve-trace", str(workload), "--json"),
        *("--requests", str(requests), "--model", "llama-3.1-8b", "--device", "cuda"),
        *("--budget", "4096", *_SCORING, *_METHODS[method]),
    ]
    environment = os.environ | environment_of(_ALLOCATORS[allocator])
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as said,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=said, text=True
        ) as process,
    ):
        assert process.stdout is not None
        answered = 0
        for line in process.stdout:
            answered += line.startswith("{")
            done()
        process.wait()
        if not answered:
            said.seek(0)
            last = said.read().strip().splitlines()[-1:] or ["it ended without a word"]
            raise TidekvError(f"{method} under the {allocator} allocator: {last[0]}")
    return _judged(allocator, method, run, _cpu_seconds() - start)


def _cpu_seconds() -> float:
    """Of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _judged(allocator: str, method: str, run: Path, cpu_seconds: float) -> Configuration:
    command = [sys.executable, "-m", "memtrace", "stability", str(run), "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    document = json.loads(answer.stdout)
    if "error" in document:
        raise TidekvError(document["error"])
    found = document["processes"][0]
    reserved = found["measures"].get("reserved") or {}
    last = found["boundaries"][-1]
    return Configuration(
        allocator=allocator,
        method=method,
        requests=found["requests"],
        answered=found["answered"],
        verdict=found["verdict"],
        slope=reserved.get("slope"),
        interval=reserved.get("interval"),
        change=reserved.get("change"),
        allocated_peak=last["allocated_peak"],
        reserved_peak=last["reserved_peak"],
        inactive_split=last["inactive_split_peak"],
        retries=last["retries"],
        cpu_seconds=cpu_seconds,
    )


def describe(lengths: Sequence[int]) -> str:
    """A cycle in words."""
    counted = (f"{lengths.count(length)} × {length:,}" for length in dict.fromkeys(lengths))
    return f"cycles of {len(lengths)}: {', '.join(counted)} tokens"


def table(rows: Sequence[Configuration], mix: str, card: str) -> str:
    """The study as text, the paper's figures beside ours."""
    lines = [
        f"Llama-3.1-8B's shapes on a virtual {card}",
        mix,
        "",
        f"{'':<24}{'SnapKV':>12}{'TideKV':>12}{'paper: SnapKV':>16}{'TideKV':>12}",
    ]
    for allocator in _ALLOCATORS:
        found = {row.method: row for row in rows if row.allocator == allocator}
        snapkv, tidekv = (found[method] for method in _METHODS)
        native = allocator == "native"
        lines.append(allocator if native else f"{allocator} (bounds)")
        split = [f"{split:.3f} GiB" for split, _ in _PAPER.values()] if native else ["-", "-"]
        retries = [str(count) for _, count in _PAPER.values()] if native else ["-", "-"]
        for name, show, paper in (
            ("answered", lambda one: f"{one.answered}/{one.requests}", ["150/150"] * 2),
            ("verdict", lambda one: one.verdict, ["", ""]),
            ("reserved, a request", lambda one: _size(one.slope), ["~0"] * 2),
            ("  95 % up to", lambda one: _size(one.interval and one.interval[1]), ["", ""]),
            ("  first to last cycle", lambda one: _size(one.change), ["0 MiB"] * 2),
            ("inactive split", lambda one: _size(one.inactive_split), split),
            ("retries", lambda one: _count(one.retries), retries),
            ("allocated peak", lambda one: _size(one.allocated_peak), ["", ""]),
            ("reserved peak", lambda one: _size(one.reserved_peak), ["", ""]),
            ("CPU of the run", lambda one: f"{one.cpu_seconds:.0f} s", ["", ""]),
        ):
            cells = [show(one) for one in (snapkv, tidekv)]
            lines.append(
                f"  {name:<22}{cells[0]:>12}{cells[1]:>12}{paper[0]:>16}{paper[1]:>12}".rstrip()
            )
    return "\n".join([*lines, "", *_NOTES])


_NOTES = (
    "native is PyTorch's own caching allocator. async is PyTorch's cudaMallocAsync over a pool",
    "that wastes nothing: its reserved bytes are a lower bound, and it counts no inactive split.",
    "The paper's mix of requests isn't published; TideKV reads chunks of 16,384 rows here.",
)


def _size(value: float | None) -> str:
    return "-" if value is None else format_size(round(value))


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)
