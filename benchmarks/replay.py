"""How fast a run is replayed under another allocator, on one core, and in how much memory.

    python benchmarks/replay.py [--events N]... [--runs 3] [--peers FOLDER] [--json]

The runs are those of ``make_big_trace.py``. ``compiled`` and ``readable``: the simulation alone,
all requests through CompiledAllocator and through NativeAllocator, which defines it; in CPU
seconds, the median of the runs; compiling is timed apart, once. ``command``: ``memtrace replay RUN
-o OUT`` from start to end as a process of its own, reading and writing included, with what was
compiled at hand. Events are those of the run; a free is one.

Peers read a PyTorch snapshot: a smaller run, exported. ``pip install --target FOLDER ptmem==0.1.2
pt-snap-cli==0.4.1`` and ``--peers FOLDER``. Neither answers what another allocator would do: ptmem
adds up the sizes of the recorded events; pt-snap takes them back one by one, each at the address
that was recorded, into a database. Beside them, of the same file: ``memtrace import``, and its
replay.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

EVENTS = (1_000_000, 10_000_000)
#: Events of the snapshot that the peers read, and the most that the readable definition replays.
SNAPSHOT, READABLE = 200_000, 1_000_000
LIMITS = {"events_per_second": 400_000, "peak_bytes": 4 << 30}
#: What each peer runs on a snapshot, and what it does with it; by the name of its package.
PEERS = {
    "ptmem": (
        ["-c", "from ptmem.cli import run; run()", "-s"],
        "loads it and adds up sizes over time; no addresses",
    ),
    "pt_snap_cli": (
        ["-c", "from pt_snap_cli.cli import _safe_call; _safe_call()", "import", "--no-focus"],
        "takes its events back at their recorded addresses, into SQLite",
    ),
}


def work(name: str, run: Path, runs: int) -> None:
    """Replay a run in this process; print the CPU seconds of each time, and those of compiling."""
    from memtrace.allocator.compiled import CompiledAllocator
    from memtrace.allocator.device import Device
    from memtrace.allocator.native import NativeAllocator
    from memtrace.allocator.requests import requests_of
    from memtrace.trace.reader import open_trace

    (process,) = open_trace(run).processes
    requests = requests_of(process, "cuda:0")
    total = process.manifest["cuda"]["devices"][0]["total_memory"]

    def replay() -> float:
        if name == "readable":
            allocator: Any = NativeAllocator(Device(total))
        else:
            allocator = CompiledAllocator(Device(total), streams=requests.streams)
        start = time.process_time()
        for first in range(0, len(requests.ops), 1 << 17):
            allocator.run(requests.ops[first : first + (1 << 17)])
        return time.process_time() - start

    start = time.process_time()
    if name == "compiled":
        CompiledAllocator(Device(total)).run(requests.ops[:1])
    compiling = time.process_time() - start
    seconds = [replay() for _ in range(runs)]
    print(json.dumps({"seconds": seconds, "compiling": compiling}))


def measure(command: list[str], environment: Mapping[str, str]) -> tuple[dict[str, float], str]:
    """Run a process: its wall and CPU seconds, and its largest resident memory in bytes; and what
    it printed.

    Raises:
        RuntimeError: it failed.
    """
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        out.seek(0)
        text = out.read()
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{command} ended with {process.returncode}: {text[-2000:]}")
    found = {
        "wall_seconds": time.perf_counter() - start,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
    }
    return found, text


def make(run: Path, events: int) -> int:
    """Make a run of about so many events; how many it has."""
    # In a process of its own: what ours has in memory would count as that of its children.
    script = Path(__file__).with_name("make_big_trace.py")
    measure([sys.executable, str(script), "--events", str(events), "-o", str(run)], os.environ)
    return json.loads((run / "1" / "manifest.json").read_text())["events"]


def measure_run(events: int, runs: int, folder: Path) -> dict[str, Any]:
    """The simulation alone, and the command, on a run of about so many events."""
    run, out = folder / f"{events}.memtrace", folder / f"{events}-out.memtrace"
    found: dict[str, Any] = {"events": make(run, events)}
    # What numba compiled before would hide how long that takes.
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder / f"{events}-numba")}
    for name in ("compiled", "readable"):
        if name == "readable" and events > READABLE:
            continue
        worker = [sys.executable, __file__, "--work", name, str(run), "--runs", str(runs)]
        found[name] = json.loads(measure(worker, environment)[1])
        median = statistics.median(found[name]["seconds"])
        found[name]["events_per_second"] = round(found["events"] / median)
    command = [sys.executable, "-m", "memtrace", "replay", str(run), "-o", str(out)]
    found["command"], _ = measure(command, environment)
    found["command"]["events_per_second"] = round(found["events"] / found["command"]["cpu_seconds"])
    return found


def measure_peers(peers: Path | None, folder: Path) -> dict[str, Any]:
    """What each tool does with one snapshot; None for one that isn't there."""
    run, file = folder / "small.memtrace", folder / "small.pickle"
    events = make(run, SNAPSHOT)
    memtrace = [sys.executable, "-m", "memtrace"]
    measure([*memtrace, "export", str(run), "--to", "torch-snapshot", "-o", str(file)], os.environ)
    found: dict[str, Any] = {"events": events, "file_bytes": file.stat().st_size}

    def add(name: str, what: str, arguments: list[str], **changed: str) -> None:
        one, _ = measure(arguments, {**os.environ, **changed})
        rate = round(events / one["cpu_seconds"])
        found[name] = {"does": what, **one, "events_per_second": rate}

    imported, replayed = str(folder / "imported.memtrace"), str(folder / "replayed.memtrace")
    add("memtrace import", "reads it into a run", [*memtrace, "import", str(file), "-o", imported])
    add(
        "memtrace replay",
        "decides where each block goes, and writes what that led to",
        [*memtrace, "replay", imported, "-o", replayed],
    )
    for name, (arguments, what) in PEERS.items():
        path = [str(peers)] if peers else None
        if PathFinder.find_spec(name, path) is None:
            found[name] = None
        else:
            add(
                name, what, [sys.executable, *arguments, str(file)], PYTHONPATH=":".join(path or ())
            )
    return found


def machine() -> dict[str, Any]:
    """Where this was measured."""
    import numba
    import numpy

    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [
        line.partition(": ")[2] for line in info.splitlines() if line.startswith("model name")
    ]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "numba": numba.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--events", type=int, action="append", help="of a run (default: 1 M, 10 M)")
    parser.add_argument("--runs", type=int, default=3, help="replays of each (default: 3)")
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="where peers are installed")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if args.work:
        work(args.work[0], Path(args.work[1]), args.runs)
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = []
        for events in args.events or EVENTS:
            runs.append(measure_run(events, args.runs, folder))
            print(_run_text(runs[-1]), file=sys.stderr)
        tools = measure_peers(args.peers, folder)
    found = {"schema": 1, "machine": machine(), "limits": LIMITS, "runs": runs, "snapshot": tools}
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print(_tools_text(tools))
    within = all(
        run["compiled"]["events_per_second"] >= LIMITS["events_per_second"]
        and run["command"]["peak_bytes"] <= LIMITS["peak_bytes"]
        for run in runs
    )
    return 0 if within else 1


def _run_text(run: Mapping[str, Any]) -> str:
    compiled, command = run["compiled"], run["command"]
    lines = [
        f"{run['events']:,} events",
        f"  compiled  {compiled['events_per_second']:>11,} events/s (limit "
        f"{LIMITS['events_per_second']:,}); to compile took {compiled['compiling']:.0f} s",
    ]
    if "readable" in run:
        lines.append(f"  readable  {run['readable']['events_per_second']:>11,} events/s")
    lines.append(
        f"  command   {command['events_per_second']:>11,} events/s: {command['cpu_seconds']:.1f} s "
        f"of CPU, {command['wall_seconds']:.1f} s, {command['peak_bytes'] / 2**30:.2f} GiB "
        "(limit 4)"
    )
    return "\n".join(lines)


def _tools_text(tools: Mapping[str, Any]) -> str:
    lines = [f"a snapshot of {tools['events']:,} events, {tools['file_bytes'] / 2**20:.1f} MiB"]
    for name, one in tools.items():
        if one is None:
            lines.append(f"  {name:<16}  not installed")
        elif isinstance(one, dict):
            lines.append(
                f"  {name:<16} {one['events_per_second']:>8,} events/s, "
                f"{one['cpu_seconds']:.1f} s of CPU, {one['peak_bytes'] / 2**20:,.0f} MiB: "
                f"{one['does']}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
