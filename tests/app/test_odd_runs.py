"""Every page shows something sensible of runs that have little, much or a strange thing in them."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("streamlit")

import streamlit as st

from app import views
from memtrace.trace import SCHEMA
from memtrace.trace.manifest import read_manifest, write_manifest
from memtrace.trace.schema import Action
from tests.analysis.simulated import MiB, Program
from tests.app.opening import figure, opened
from tests.app.test_choice import four_ranks
from tests.synthetic import History, prefill

CUDA = "cuda:0"
ODD: dict[str, Callable[[Path], list[str]]] = {}
#: What a page says in place of charts, of runs that hold nothing that it could show.
REFUSED = {
    "empty": "empty saw no tensor, so there is nothing to draw",
    "newer": f"newer.memtrace has trace schema {SCHEMA + 1} and this memtrace reads up to {SCHEMA};"
    " upgrade memtrace to read it",
    "damaged": "damaged.memtrace",
}


def odd(make: Callable[[Path], list[str]]) -> Callable[[Path], list[str]]:
    ODD[make.__name__] = make
    return make


@odd
def spike(folder: Path) -> list[str]:
    """A thousand small allocations, and amid them one event of a gibibyte."""
    history = History()
    for number in range(1000):
        history.free(history.alloc((1 << 30) if number == 617 else 4096, "Act"))
    return [str(history.write(folder / "spike.memtrace"))]


@odd
def empty(folder: Path) -> list[str]:
    return [str(History().write(folder / "empty.memtrace"))]


@odd
def single(folder: Path) -> list[str]:
    """One event."""
    history = History()
    history.alloc(1, "other")
    return [str(history.write(folder / "single.memtrace"))]


@odd
def single_on_a_gpu(folder: Path) -> list[str]:
    simulated = Program(100 * MiB)
    simulated.alloc(MiB)
    return [str(simulated.write(folder / "gpu.memtrace"))]


@odd
def out_of_memory(folder: Path) -> list[str]:
    simulated = Program(100 * MiB)
    for _ in range(10):
        simulated.alloc(8 * MiB)
    simulated.alloc(16 * MiB)
    return [str(simulated.write(folder / "oom.memtrace"))]


@odd
def only_failures(folder: Path) -> list[str]:
    """Its first request failed, and nothing was ever allocated."""
    history = History()
    history.event(Action.OOM, 0, 5 * MiB, None, device=CUDA)
    return [str(history.write(folder / "failed.memtrace"))]


@odd
def without_requests(folder: Path) -> list[str]:
    history = History()
    for _ in range(20):
        history.free(history.alloc(MiB, "Act"))
    return [str(history.write(folder / "plain.memtrace"))]


@odd
def truncated(folder: Path) -> list[str]:
    """The recorder was killed, and the last batch is torn."""
    run = prefill().write(folder / "torn.memtrace", complete=False)
    [events] = run.rglob("events*")
    events.write_bytes(events.read_bytes()[:-40])
    return [str(run)]


@odd
def damaged(folder: Path) -> list[str]:
    run = prefill().write(folder / "damaged.memtrace")
    (run / "manifest.json").write_text("{")
    return [str(run)]


@odd
def newer(folder: Path) -> list[str]:
    run = prefill().write(folder / "newer.memtrace")
    write_manifest(run, read_manifest(run) | {"schema": SCHEMA + 1})
    return [str(run)]


@odd
def eight(folder: Path) -> list[str]:
    return [str(prefill(scale=n).write(folder / f"run{n}.memtrace")) for n in range(1, 9)]


@odd
def ranks(folder: Path) -> list[str]:
    return [four_ranks(folder)]


@odd
def frees_of_what_is_unknown(folder: Path) -> list[str]:
    """Nothing but what a truncated history begins with."""
    history = History()
    history.event(Action.FREE, 7, MiB, "Act")
    history.event(Action.ALLOC, 9, MiB, "Act")
    return [str(history.write(folder / "unknown.memtrace"))]


@odd
def strange_names(folder: Path) -> list[str]:
    """What Markdown, LaTeX, HTML or a page could take for something else, and two equal names."""
    strange = "$x^2$ *b* <script>alert(1)</script> [a](b) `c` :smile: | ~~s~~ 漢 \u202e &amp; "
    strange += "https://example.org www.example.org me@example.org "
    runs = []
    for place in ("one", "two"):
        history = History()
        for number, text in enumerate((strange, "L" * 300, "", " ", strange + "again", "日本語")):
            start = history.time_us
            with history.scope("request", text), history.scope("phase", strange):
                history.alloc((1 + number) * MiB, "Act", op=strange + text)
            history.rows["requests"].append((text, 8, 3, start, start, history.time_us - 1, "ok"))
        runs.append(str(history.write(folder / place / f"a $x$ *b* <b> {'N' * 150}.memtrace")))
    return runs


@odd
def every_kind(folder: Path) -> list[str]:
    """Runs on a GPU, on a CPU, whole and failed, beside each other."""
    return [*out_of_memory(folder), *spike(folder), *single(folder), *truncated(folder)]


@pytest.fixture(autouse=True)
def shelf() -> Iterator[None]:
    yield
    st.cache_resource.clear()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Sequence[str]]:
    made: dict[str, Sequence[str]] = {}

    def of(name: str) -> Sequence[str]:
        return made.setdefault(name, ODD[name](tmp_path_factory.mktemp(name)))

    return of


@pytest.mark.parametrize("name", list(ODD))
@pytest.mark.parametrize("path", [view.PATH for view in views.ALL])
def test_a_page_shows_something_or_says_one_clear_sentence(
    path: str,
    name: str,
    runs: Callable[[str], Sequence[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = opened(monkeypatch, list(runs(name)), path)  # no stack of frames
    said = [error.value.replace("\\", "") for error in app.error]
    if name in REFUSED:
        assert len(said) == 1 and REFUSED[name] in said[0]
        assert not app.get("plotly_chart")
    else:
        assert app.get("plotly_chart") or app.info or path in ("what-if", "plan")
        assert all("ran out of memory" in one for one in said)
    assert not any("Traceback" in one or "\n" in one for one in said)


def test_a_spike_of_one_event_is_as_tall_as_it_was(
    runs: Callable[[str], Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = opened(monkeypatch, list(runs("spike")), "timeline")
    [peak] = [one for one in figure(app, "timeline")["data"] if one["name"] == "peak"]
    assert peak["text"] == ["peak 1.00 GiB"]
