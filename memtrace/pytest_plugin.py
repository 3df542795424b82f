"""Memory budgets as tests.

    def test_prefill(memory_budget):
        with memory_budget(peak="300 MiB", Temp="8 MiB"):
            prefill(model, ids)

The block fails when it allocates more than its budget; the failure shows every component and the
largest allocations at the peak. Budgets count what the block adds to what was allocated on entry.
"""

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from memtrace.components import TENSOR_COMPONENTS
from memtrace.errors import MemtraceError
from memtrace.sizes import format_size, parse_size

if TYPE_CHECKING:
    from memtrace.analysis.blocks import Block
    from memtrace.record.session import Session

Budget = Callable[..., AbstractContextManager[None]]


@pytest.fixture
def memory_budget(tmp_path_factory: pytest.TempPathFactory) -> Budget:
    """``with memory_budget(peak="300 MiB", Temp="8 MiB"): …``

    ``peak`` limits the sum of all components, a component's name its own peak. Limits are sizes
    as text or bytes as an int; being exactly at a limit passes. Each device is judged by itself;
    meta tensors hold no memory. Threads that ran before the block are not seen, with a warning,
    unless pytest itself runs under ``memtrace record``.
    """

    @contextmanager
    def budget(**limits: str | int) -> Iterator[None]:
        sizes = _limits(limits)
        with _recording(tmp_path_factory) as session:
            start = session.checkpoint()
            yield
            session.checkpoint()
            problem = _judge(session.folder, start, sizes)
        if problem:
            pytest.fail(problem, pytrace=False)

    return budget


def _limits(limits: Mapping[str, str | int]) -> dict[str, int]:
    known = ("peak", *TENSOR_COMPONENTS)
    if unknown := [name for name in limits if name not in known]:
        raise MemtraceError(
            f"memory_budget doesn't know {unknown[0]!r}; budgets are {', '.join(known)}"
        )
    if not limits:
        raise MemtraceError('memory_budget needs a budget, as in memory_budget(peak="300 MiB")')
    return {name: parse_size(limit) for name, limit in limits.items()}


@contextmanager
def _recording(factory: pytest.TempPathFactory) -> Iterator["Session"]:
    """The recording that this process is under already (``memtrace record -- pytest``), or one."""
    from memtrace.record.here import record_here
    from memtrace.record.session import Session

    active = Session.active()
    if active is not None:
        yield active
        return
    others = [one.name for one in threading.enumerate() if one is not threading.current_thread()]
    if others:
        warnings.warn(
            "memory_budget can't see what threads allocate that ran before it: "
            f"{', '.join(others)}; memtrace record -- pytest does",
            stacklevel=4,
        )
    with record_here(factory.mktemp("budget") / "budget.memtrace") as session:
        session.adopt_existing()
        yield session


def _judge(folder: Path, start: int, limits: Mapping[str, int]) -> str | None:
    """What a block that began at event ``start`` did wrong; None: within its limits."""
    from memtrace.analysis.accounts import accounts
    from memtrace.analysis.blocks import block
    from memtrace.trace.manifest import read_manifest
    from memtrace.trace.reader import ProcessTrace

    process = ProcessTrace(folder, read_manifest(folder), {})
    if failure := process.manifest.get("failure"):
        return f"memory budget can't be judged, the recording is incomplete: {failure}"
    for account in accounts(process):
        if account.device != "meta":
            one = block(account, start)
            used = {"peak": one.peak, **one.own_peaks}
            over = [name for name, limit in limits.items() if used[name] > limit]
            if over:
                return _explain(one, used, limits, over)
    return None


def _explain(
    one: "Block", used: Mapping[str, int], limits: Mapping[str, int], over: Sequence[str]
) -> str:
    lines = [
        "memory budget exceeded: "
        + ", ".join(f"{n} {format_size(used[n])} > {format_size(limits[n])}" for n in over),
        f"peak on {one.account.device} in {one.place}",
        "",
        f"{'component':<12}{'at the peak':>14}{'own peak':>14}{'budget':>14}",
    ]
    for name, size in used.items():
        at_peak = one.peak if name == "peak" else one.components[name]
        budget = format_size(limits[name]) if name in limits else ""
        lines.append(f"{name:<12}{format_size(at_peak):>14}{format_size(size):>14}{budget:>14}")
    lines += ["", "largest allocations at the peak:"]
    lines += [
        f"{format_size(group.bytes):>12}  {group.component:<14}{group.count:>5} ×  {group.where}"
        for group in one.top[:8]
    ]
    return "\n".join(lines)
