"""Memory budgets as tests; docs/pytest.md describes them.

    @pytest.mark.memory_budget(peak="300 MiB", Temp="8 MiB", phase="prefill")
    def test_prefill(model, ids):
        prefill(model, ids)

    def test_prefill(memory_budget):
        with memory_budget(peak="300 MiB", Temp="8 MiB"):
            prefill(model, ids)

    @pytest.mark.memory_budget(device="rtx-4090-24g")  # which isn't there
    def test_it_fits(): ...

pytest imports this module in every project that has memtrace installed, so it imports nothing but
pytest. :mod:`memtrace.budgets` does the work, from the first test that asks for it on.
"""

import shutil
import tempfile
import threading
from collections.abc import Callable, Set
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import pytest

if TYPE_CHECKING:
    from memtrace.budgets.options import Options
    from memtrace.budgets.running import Running

Budget = Callable[..., AbstractContextManager[None]]

_RUNNING, _REPORTING = "memtrace-running", "memtrace-reporting"
#: Where xdist's controller tells its workers which folder they share.
_SHARED = "memtrace_shared"

_MARKERS = (
    'memory_budget(peak="2 GiB", KV_res="512 MiB", …, phase=None, tolerance=0, scope="test", '
    'warmup=0, name=None, device=None, allocator=""): fail the test if it takes more memory, on a '
    "card that isn't there if one is named (docs/pytest.md)",
    'memory_plateau(requests, slope="1 MiB/100 requests", warmup=None): fail the test if memory '
    "grows over its requests",
)
#: Each is an option and, with underscores, its twin in the configuration.
_OPTIONS = (
    ("save", "NAME", "save what the budgeted tests take as NAME"),
    ("compare", "NAME", "compare what they take with what was saved as NAME"),
    ("json", "FILE", "write a JSON report (docs/json.md)"),
    ("traces", "DIR", "where traces of tests over budget are kept (default: pytest's cache)"),
    ("stacks", "N", "Python frames to keep for each allocation (default: 8)"),
    ("storage", "DIR", "where measurements are saved (default: .memory_budgets)"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("memory budgets")
    for name, metavar, text in _OPTIONS:
        group.addoption(f"--memory-{name}", metavar=metavar, help=text)
        parser.addini(f"memory_{name}", text)
    text = "fail tests that take more than was saved: peak:5%%, Temp:1MiB (repeatable)"
    group.addoption("--memory-compare-fail", metavar="METRIC:MORE", action="append", help=text)
    parser.addini("memory_compare_fail", text.replace("%%", "%"), type="linelist")
    parser.addini("memory_budget", "a budget for every test, as lines peak = 2 GiB", "linelist")


def pytest_configure(config: pytest.Config) -> None:
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)
    if _is_configured(config):
        _report(config)


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    # Threads of the harness (xdist and reruns have some) aren't the tests'.
    session.config.stash[_HARNESS] = WeakSet(threading.enumerate())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Parse budgets before anything runs; without any nothing more is imported."""
    if not config.getini("memory_budget") and not any(map(_wants, items)):
        return
    from memtrace.budgets.plans import PLAN, baselines_first, plan

    running = _run(config)
    options = running.options
    for item in items:
        found = plan(item, options.default, options.regressions_for(item.nodeid, None))
        if found is not None:
            item.stash[PLAN] = found
    running.awaited |= baselines_first(items)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A worker of xdist starts: it tells, and shares baselines with the others."""
    _report(node.config)
    node.workerinput[_SHARED] = str(_shared(node.config))


@pytest.fixture
def memory_budget(request: pytest.FixtureRequest) -> Budget:
    """``with memory_budget(peak="300 MiB", Temp="8 MiB"): …``

    ``peak`` limits the sum of all components, a component's name its own peak, ``end`` what is
    left and ``total`` all that is ever allocated. Limits are sizes as text, bytes as an int, or
    relative: ``"50 % of NAME"`` of what ``memory_budget(name=NAME)`` measured. Being exactly at a
    limit is within it. Each device is judged by itself. docs/pytest.md says more.
    """
    running = _run(request.config)

    def budget(**words: object) -> AbstractContextManager[None]:
        __tracebackhide__ = True
        return running.block(request.node, words)

    return budget


def _wants(item: pytest.Item) -> bool:
    return (
        item.get_closest_marker("memory_budget") is not None
        or item.get_closest_marker("memory_plateau") is not None
        or "memory_budget" in getattr(item, "fixturenames", ())
    )


def _is_configured(config: pytest.Config) -> bool:
    names = [f"memory_{name}" for name, *_ in _OPTIONS] + ["memory_compare_fail"]
    options = [config.getoption(name) for name in names]
    return any(options) or any(config.getini(name) for name in (*names, "memory_budget"))


def _options(config: pytest.Config) -> "Options":
    from memtrace.budgets.options import read_options
    from memtrace.errors import MemtraceError

    try:
        return read_options(config)
    except MemtraceError as error:
        raise pytest.UsageError(f"memtrace: {error}") from None


def _report(config: pytest.Config) -> None:
    if not config.pluginmanager.has_plugin(_REPORTING):
        from memtrace.budgets.reporting import Reporting

        config.pluginmanager.register(Reporting(config, _options(config)), _REPORTING)


def _run(config: pytest.Config) -> "Running":
    running = config.pluginmanager.get_plugin(_RUNNING)
    if running is None:
        from memtrace.budgets.dry import Dry
        from memtrace.budgets.running import Running
        from memtrace.budgets.store import Baselines

        baselines = Baselines(_shared(config))
        running = Running(config, _options(config), baselines, config.stash[_HARNESS])
        config.pluginmanager.register(running, _RUNNING)
        if running.card is None:
            config.pluginmanager.register(Dry(running))
        _report(config)
    return running


def _shared(config: pytest.Config) -> Path:
    """A folder for this session, its xdist workers included."""
    worker = getattr(config, "workerinput", {})
    if _SHARED in worker:
        return Path(worker[_SHARED])
    folder = config.stash.get(FOLDER, None)
    if folder is None:
        folder = config.stash[FOLDER] = Path(tempfile.mkdtemp(prefix="memtrace-"))
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    return folder


#: Where baselines are.
FOLDER = pytest.StashKey[Path]()
_HARNESS = pytest.StashKey[Set[threading.Thread]]()
