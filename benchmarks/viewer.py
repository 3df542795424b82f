"""How fast the viewer shows a run, and in how much memory; in Debian's Chromium, headless.

    python benchmarks/viewer.py [--events N]... [--repeats 5] [--peers FOLDER] [--json]

The runs are those of ``make_big_trace.py``. ``answers``: from ``memtrace view RUN`` until the
server answers. ``first_page``, ``timeline``: from then, in a browser that was never there, until
the page's chart is drawn; ``bare``: the same of a page that has nothing but a chart of two bars,
which no page of Streamlit's can beat on this machine at this time. ``zoom``: from the end of a drag
until the part is drawn; ``click``: from a click until what was alive is drawn, of which 0.25 s is
the wait for a second click; ``slider``: from an arrow key on the slider of Fragmentation until the
segments there are drawn. ``query``: in a process of its own, reading a random part of the
timeline down to what is drawn; ``figure``: that and building the figure; ``instant``: what is alive
at a random instant, grouped. ``resident``: of the server in the end; ``highest``: ever, while it
read the run. Seconds of wall time are the best of the repeats and their median; those of the CPU
are medians: the viewer's, and all others', which is the browser with its driver.

Peers read a PyTorch snapshot: a smaller run, exported. ``pip install --target FOLDER ptmem==0.1.2
pt-snap-cli==0.4.1`` and ``--peers FOLDER``. ptmem's terminal can't be driven here, so it is the
summary that it prints; pt-snap fills a database, and from it makes a flame graph of one instant.
The page that PyTorch itself writes (``torch.cuda._memory_viz trace_plot``) takes its code from the
network when it is opened, which a machine that is offline can't; so it is only written. Beside
them, of the same events, the viewer.
"""

import argparse
import json
import os
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from replay import SNAPSHOT, machine, make, measure

EVENTS = 10_000_000
LIMITS = {"first_page": 3.0, "query": 0.1, "zoom": 0.6, "slider": 0.6, "resident": 1.5 * 2**30}
#: What a reader waits for.
WAITS = ("bare", "first_page", "timeline", "zoom", "click", "slider")
#: The least that a page can be: what it takes is Streamlit's, Plotly's and the browser's.
BARE = """\
import plotly.graph_objects as go
import streamlit as st

st.plotly_chart(go.Figure(go.Bar(x=[1, 2], y=[3, 4])), key="bare")
"""
_SIZE = {"width": 1280, "height": 1000}
_DRAWN = "() => document.querySelector('.st-key-{} .js-plotly-plot .{} path')"
_SEGMENTS = """() => [...document.querySelectorAll(".st-key-segments .fills path")]
    .map((path) => path.getAttribute("d")).join()"""
_RANGE = "() => document.querySelector('.st-key-timeline .js-plotly-plot')._fullLayout.xaxis.range"


def query(run: Path, repeats: int) -> None:
    """Read random parts and instants in this process; print the seconds of each."""
    from app.figures.style import LIGHT
    from app.figures.timeline import Panel, Scale, timelines
    from memtrace.analysis.alignment import by_time
    from memtrace.analysis.peaks import top_allocations
    from memtrace.analysis.summary import summarise
    from memtrace.analysis.timeline import timeline
    from memtrace.trace.reader import open_trace

    one = summarise(open_trace(run)).primary
    assert one is not None
    account, draw = one.account, random.Random(0)
    axis = by_time(int(account.time_us[0]), int(account.time_us[-1]))
    found: dict[str, list[float]] = {"query": [], "figure": [], "instant": []}
    for _ in range(10 * repeats):
        scale = Scale("seconds", tuple(sorted(draw.uniform(*axis.at) for _ in range(2))))
        edges = axis.times(scale.edges)
        start = time.perf_counter()
        part = timeline(account, one.memory, span_us=(edges[0], edges[-1]), bins=edges)
        found["query"].append(time.perf_counter() - start)
        timelines([Panel("run", part, one.peak, None, axis)], scale, LIGHT)
        found["figure"].append(time.perf_counter() - start)
        event = draw.randrange(len(account.time_us))
        start = time.perf_counter()
        top_allocations(account, event)
        found["instant"].append(time.perf_counter() - start)
    print(json.dumps(found))


@contextmanager
def serving(*words: str) -> Iterator[tuple[subprocess.Popen[bytes], str, float]]:
    """A server, its address, and the seconds until it answered; ``words``: a module and its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = time.perf_counter()
    command = [sys.executable, "-m", *words]
    port_options = ["--no-browser", "--port", str(port)]
    if words[0] == "streamlit":
        port_options = ["--server.headless=true", f"--server.port={port}"]
    server = subprocess.Popen(
        [*command, *port_options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/_stcore/health", timeout=1).close()
                break
            except OSError:
                if server.poll() is not None:
                    raise RuntimeError("the server ended") from None
                time.sleep(0.05)
        yield server, url, time.perf_counter() - start
    finally:
        server.kill()
        server.wait()


def memory(server: subprocess.Popen[bytes]) -> dict[str, int]:
    """Bytes of the server, now and at most."""
    status = Path(f"/proc/{server.pid}/status").read_text()
    names = {"resident": "VmRSS", "highest": "VmHWM"}
    return {
        name: int(re.search(rf"{key}:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]
        for name, key in names.items()
    }


def cpu(server: int) -> tuple[float, float]:
    """Seconds that the server and all other processes of this benchmark have computed."""
    parents, seconds = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            pid = int(folder.name)
            parents[pid] = int(fields[1])
            seconds[pid] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def ours(pid: int) -> bool:
        return pid == os.getpid() or (pid in parents and ours(parents[pid]))

    return seconds[server], sum(seconds[pid] for pid in seconds if pid != server and ours(pid))


def show(run: Path, bare: Path, repeats: int) -> dict[str, Any]:
    """Everything that a reader waits for, in seconds, and the server's memory.

    ``bare``: the file of a page as :data:`BARE`.
    """
    from playwright.sync_api import Page, sync_playwright

    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in WAITS}
    with (
        serving("streamlit", "run", str(bare)) as (_, bare_url, _),
        serving("memtrace", "view", str(run)) as (server, url, answers),
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )

        def timed(name: str, begin: Callable[[], object], page: Page, until: str) -> None:
            before = (time.perf_counter(), *cpu(server.pid))
            begin()
            page.wait_for_function(until)
            after = (time.perf_counter(), *cpu(server.pid))
            found[name].append(tuple(end - start for start, end in zip(before, after, strict=True)))

        for _ in range(repeats):
            for name, path, drawn in (
                ("bare", bare_url, _DRAWN.format("bare", "barlayer")),
                ("first_page", url, _DRAWN.format("equation", "barlayer")),
                ("timeline", f"{url}/timeline", _DRAWN.format("timeline", "fills")),
            ):
                page = browser.new_page(viewport=_SIZE)
                timed(name, partial(page.goto, path), page, drawn)
                if name != "timeline":
                    page.close()
            page.wait_for_timeout(1000)
            area = page.locator('.nsewdrag[data-subplot="xy"]').first.bounding_box()
            x, y = area["x"] + area["width"] / 2, area["y"] + area["height"] / 2
            low, high = page.evaluate(_RANGE)
            page.mouse.move(x, y)
            page.mouse.down()
            page.mouse.move(x + area["width"] / 4, y + 5, steps=5)
            middle, fills = low + 0.4 * (high - low), _DRAWN.format("timeline", "fills")
            zoomed = f"() => ({_RANGE})()[0] > {middle} && ({fills})()"
            timed("zoom", page.mouse.up, page, zoomed)
            page.wait_for_timeout(1000)
            page.mouse.move(x, y)
            page.wait_for_timeout(500)
            alive = (
                "() => [...document.querySelectorAll('h3')].some(h => h.innerText == 'Alive at A')"
            )
            icicle, old = _DRAWN.format("alive-0", "iciclelayer"), "[data-stale=true]"
            drawn = f"() => ({alive})() && ({icicle})() && !document.querySelector('{old}')"
            timed("click", partial(page.mouse.click, x, y), page, drawn)
            page.goto(f"{url}/fragmentation")
            page.wait_for_function(_DRAWN.format("unused", "heatmaplayer").replace("path", "image"))
            page.wait_for_timeout(1000)
            press = partial(page.get_by_role("slider").first.press, "ArrowLeft")
            for _ in range(3):
                page.evaluate(f"window.before = ({_SEGMENTS})()")
                timed("slider", press, page, f"() => ({_SEGMENTS})() != window.before")
                page.wait_for_timeout(500)
            page.close()
        browser.close()
        shown = {name: summary(*zip(*times, strict=True)) for name, times in found.items()}
        return {"answers": answers, **memory(server), **shown}


def summary(seconds: Sequence[float], *busy: Sequence[float]) -> dict[str, float]:
    """Of repeated seconds; ``busy``: those of the server's CPU, and of the browser's."""
    found = {"best": min(seconds), "median": statistics.median(seconds)}
    cpus = zip(("server_cpu", "browser_cpu"), map(statistics.median, busy), strict=False)
    return found | dict(cpus)


def measure_run(run: Path, events: int, repeats: int) -> dict[str, Any]:
    """All numbers of one run."""
    worker = [sys.executable, __file__, "--work", str(run)]
    _, text = measure([*worker, "--repeats", str(repeats)], os.environ)
    queries = {name: summary(times) for name, times in json.loads(text).items()}
    bare = run.with_name("bare.py")
    bare.write_text(BARE)
    return {"events": events, **show(run, bare, repeats), **queries}


def measure_peers(peers: Path | None, folder: Path, repeats: int) -> dict[str, Any]:
    """What each tool takes for one snapshot, and the viewer for the run that it was made from."""
    run, file = folder / "small.memtrace", folder / "small.pickle"
    events = make(run, SNAPSHOT)
    memtrace = [sys.executable, "-m", "memtrace"]
    measure([*memtrace, "export", str(run), "--to", "torch-snapshot", "-o", str(file)], os.environ)
    found: dict[str, Any] = {"events": events, "viewer": measure_run(run, events, repeats)}
    html = folder / "trace.html"
    viz = [sys.executable, "-m", "torch.cuda._memory_viz", "trace_plot", str(file), "-o", str(html)]
    found["torch trace_plot"], _ = measure(viz, os.environ)
    found["torch trace_plot"]["html_bytes"] = html.stat().st_size
    if peers is not None:
        there = {**os.environ, "PYTHONPATH": str(peers)}
        snap = [sys.executable, "-c", "from pt_snap_cli.cli import _safe_call; _safe_call()"]
        ptmem = [sys.executable, "-c", "from ptmem.cli import run; run()"]
        found["ptmem summary"], _ = measure([*ptmem, "-s", str(file)], there)
        filling = [*snap, "import", "--no-focus", str(file), "-o", str(folder)]
        found["pt-snap import"], _ = measure(filling, there)
        [database] = folder.glob("*.db")
        tree = [*snap, "report", "memory-tree", "--format", "html", "--event-id", str(events // 2)]
        found["pt-snap instant"], _ = measure([*tree, str(database)], there)
    return found


def text_of(run: Mapping[str, Any]) -> str:
    """One run's numbers beside their limits."""
    lines = [f"{run['events']:,} events; the server answers after {run['answers']:.1f} s"]
    for name in (*WAITS, "query", "figure", "instant"):
        one = run[name]
        limit = f", limit {LIMITS[name]:g} s" if name in LIMITS else ""
        busy = ""
        if "server_cpu" in one:
            busy = f", CPU {one['server_cpu']:.2f} + {one['browser_cpu']:.2f} s"
        lines.append(
            f"  {name:<10} {one['best']:.3f} s (median {one['median']:.3f} s{busy}{limit})"
        )
    for name in ("resident", "highest"):
        lines.append(f"  {name:<10} {run[name] / 2**30:.2f} GiB")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--events", type=int, action="append", help="of a run (default: 10 M)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="where peers are installed")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        query(args.work, args.repeats)
        return 0
    runs = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for events in args.events or [EVENTS]:
            run = folder / f"{events}.memtrace"
            runs.append(measure_run(run, make(run, events), args.repeats))
            print(text_of(runs[-1]), file=sys.stderr)
        tools = measure_peers(args.peers, folder, args.repeats)
    here = machine() | {"streamlit": version("streamlit"), "load": os.getloadavg()[1]}
    found = {"schema": 1, "machine": here, "limits": LIMITS, "runs": runs, "snapshot": tools}
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        for name, one in tools.items():
            if isinstance(one, dict) and "wall_seconds" in one:
                print(
                    f"{name:<17} {one['wall_seconds']:.1f} s, CPU {one['cpu_seconds']:.1f} s, "
                    f"{one['peak_bytes'] / 2**30:.2f} GiB"
                )
    within = all(
        run["resident"] <= LIMITS["resident"]
        and all(
            run[name]["best"] <= LIMITS[name] for name in ("first_page", "query", "zoom", "slider")
        )
        for run in runs
    )
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
