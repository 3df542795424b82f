"""All pages in a real browser, of the demo's two methods and of a pair on a virtual GPU.

With ``MEMTRACE_SCREENSHOTS`` a folder, what each page looked like is kept there.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit")

import torch

import tidekv
from app import views
from memtrace import record_here, scopes
from tests.app.browsing import browsing, drag, serving, settle
from tests.app.test_odd_runs import ODD
from tests.test_end_to_end import untrained

SCHEDULES = {"snapkv": "whole_prompt", "tidekv": "layer_major"}
#: A chart of each page, and what of it is there once it is drawn; None: no chart of these runs.
CHARTS: dict[str, dict[str, str | None]] = {
    "demo": {
        "overview": ".st-key-equation .bars path",
        "timeline": ".st-key-timeline .scatterlayer .fills path",
        "fragmentation": None,
        "requests": ".st-key-requests .scatterlayer path",
        "allocations": ".st-key-hot-spots .bars path",
        "what-if": None,
        "plan": None,
    }
}
CHARTS["virtual"] = CHARTS["demo"] | {"fragmentation": ".st-key-segments .scatterlayer .fills path"}


#: How many pixels a page is high.
HEIGHT = "document.querySelector('[data-testid=stMain]').scrollHeight"
#: By how many pixels a page is wider than the window.
ACROSS = """() => {
    const main = document.querySelector("[data-testid=stMain]");
    return main.scrollWidth - main.clientWidth;
}"""


def demo(folder: Path) -> list[Path]:
    """What ``make demo`` records, of two layers and a short prompt."""
    model, ids = untrained(512), torch.randint(512, (1, 2048))
    runs = []
    for name, schedule in SCHEDULES.items():
        runs.append(folder / f"{name}.memtrace")
        with record_here(runs[-1]):
            for number in range(3):
                with scopes.request(f"q{number}", prompt_tokens=2048):
                    tidekv.prefill(model, ids, schedule=schedule, budget=128, chunk_size=256)
    return runs


def virtual(folder: Path) -> list[Path]:
    """What ``make demo-virtual`` records, of a shorter prompt."""
    runs = []
    for name, schedule in SCHEDULES.items():
        runs.append(folder / f"llama-{name}.memtrace")
        words = [
            *("record", "-q", "-o", str(runs[-1]), "--virtual-gpu", "a100-40g", "--"),
            *(sys.executable, "-m", "tidekv", "run", "--model", "llama-3.1-8b"),
            *("--prompt-tokens", "8192", "--device", "cuda", "--selector", "snapkv"),
            *("--budget", "1024", "--max-new-tokens", "2", "--schedule", schedule),
        ]
        subprocess.run([sys.executable, "-m", "memtrace", *words], check=True, capture_output=True)
    return runs


@pytest.fixture(scope="module", params=list(CHARTS))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """Its name, and the address of a server that shows it."""
    folder = tmp_path_factory.mktemp(request.param)
    runs = {"demo": demo, "virtual": virtual}[request.param](folder)
    with serving(folder, *runs) as (_, url):
        yield request.param, url


def keep(page: Any, name: str) -> None:
    """A picture of the whole page, where pictures are kept."""
    folder = os.environ.get("MEMTRACE_SCREENSHOTS")
    if folder is None:
        return
    width, seen = page.viewport_size["width"], 0
    while (height := page.evaluate(HEIGHT)) > seen:  # what comes into view may grow
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_timeout(500)  # until charts know their width
        settle(page)
        seen = height
    page.screenshot(path=Path(folder) / f"{name}.png")
    page.set_viewport_size({"width": width, "height": 1000})


#: All that is looked at where pictures are kept, else the extremes.
LOOKS = [(1280, "light"), (1920, "dark")]
if "MEMTRACE_SCREENSHOTS" in os.environ:
    LOOKS += [(1280, "dark"), (1920, "light")]


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_each_page_opens_by_its_address(pair: tuple[str, str], width: int, scheme: str) -> None:
    name, url = pair
    with browsing(url, width, scheme) as page:
        for path in (view.PATH for view in views.ALL):
            page.goto(f"{url}/{path}")
            drawn = CHARTS[name][path]
            if drawn is None:
                text = "No segments were recorded" if path == "fragmentation" else "What comes of"
                page.get_by_text(text).first.wait_for()
            else:
                page.locator(drawn).first.wait_for(state="attached")
            settle(page)
            assert page.locator("[data-testid=stException]").count() == 0
            keep(page, f"{name}-{path}-{width}-{scheme}")


#: What is in the address, too, of runs that are no pair.
ODDER = {
    "eight": "",
    "ranks": "&".join(f"in+ranks=rank+{rank},+cpu" for rank in range(4)),
    "every_kind": "",
    "strange_names": "",
    "empty": "",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ODDER))
def test_odd_runs_fit_the_page(name: str, tmp_path: Path) -> None:
    with serving(tmp_path, *map(Path, ODD[name](tmp_path))) as (_, url):
        for width, scheme in LOOKS if "MEMTRACE_SCREENSHOTS" in os.environ else LOOKS[:1]:
            with browsing(url, width, scheme) as page:
                for path in (view.PATH for view in views.ALL):
                    page.goto(f"{url}/{path}?{ODDER[name]}")
                    page.get_by_text("Runs", exact=True).wait_for()
                    settle(page)
                    assert page.locator("[data-testid=stException]").count() == 0
                    assert page.evaluate(ACROSS) <= 0
                    assert page.locator("[data-testid=stMain] a[target=_blank]").count() == 0
                    keep(page, f"{name}-{path}-{width}-{scheme}")


@pytest.mark.slow
def test_a_drag_zooms_and_a_click_lists_what_is_alive(pair: tuple[str, str]) -> None:
    with browsing(f"{pair[1]}/timeline") as page:
        x, y = drag(page, 0.25)
        page.wait_for_url("**from=**to=**")
        page.locator("[data-stale=true]").first.wait_for(state="detached")
        page.mouse.move(x, y)
        page.locator(".hoverlayer .hovertext, .hoverlayer .legend").first.wait_for()
        page.mouse.click(x, y)
        page.wait_for_url("**at=**")
        page.get_by_text("Alive at A").wait_for()
        page.locator(".st-key-alive-0 .iciclelayer path").first.wait_for()
        page.locator("[data-testid=stTable]").first.wait_for()


@pytest.mark.slow
def test_the_slider_moves_the_map(pair: tuple[str, str]) -> None:
    name, url = pair
    if name != "virtual":
        pytest.skip("a CPU has no segments")
    with browsing(f"{url}/fragmentation") as page:
        page.locator(".st-key-segments .scatterlayer .fills path").first.wait_for()
        said = page.get_by_text("reserved in").first
        before = said.inner_text()
        for _ in range(40):
            page.get_by_role("slider").first.press("ArrowLeft")
        page.wait_for_url("**instant=**")
        page.wait_for_function("text => !document.body.innerText.includes(text)", arg=before)
        assert said.inner_text() != before


@pytest.mark.slow
def test_every_chart_is_saved_as_what_it_is(pair: tuple[str, str], tmp_path: Path) -> None:
    name, url = pair
    for path, drawn in CHARTS[name].items():
        if drawn is None:
            continue
        with browsing(f"{url}/{path}") as page:
            page.locator(drawn).first.wait_for(state="attached")
            page.locator("[data-stale=true]").first.wait_for(state="detached")
            for kind, begin in (("CSV", b""), ("SVG", b"<svg"), ("PNG", b"\x89PNG")):
                with page.expect_download() as started:
                    page.get_by_role("button", name=kind).first.click()
                saved = tmp_path / started.value.suggested_filename
                started.value.save_as(saved)
                assert saved.suffix == f".{kind.lower()}"
                assert saved.read_bytes().startswith(begin) and saved.stat().st_size > 100
