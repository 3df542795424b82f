"""Dry runs without following values: the same trace, or a stop at the first read."""

import sys
from pathlib import Path

import pytest

from memtrace import dry_run
from memtrace.analysis.summary import Values, summarise
from memtrace.trace.reader import Trace
from memtrace.virtual_gpu import READ_UNFOLLOWED
from tests.virtual_gpu.running import described

SCRIPT = """
import sys, torch
from memtrace import scopes

x = torch.ones(64, 1024, device="cuda")
with scopes.request("one"), scopes.component("Act"), scopes.layer(3):
    for _ in range(20):
        x = torch.softmax(x @ x.T @ x, -1)
    large = torch.zeros(1 << 20, device="cuda").cpu()
    print(int(large.sum()))
    if "read" in sys.argv:
        print(bool((torch.arange(3, device="cuda") == 2).any()))
"""


def run(folder: Path, *arguments: str, follow: bool) -> tuple[Trace, str]:
    with (folder / f"said-{follow}").open("w+") as said:
        trace = dry_run(
            [sys.executable, "-c", SCRIPT, *arguments],
            device="l4-24g",
            out=folder / f"{follow}.memtrace",
            stdout=said.fileno(),
            follow_values=follow,
        )
        said.seek(0)
        return trace, said.read()


@pytest.fixture(scope="module")
def both(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Trace]:
    folder = tmp_path_factory.mktemp("both")
    (followed, one), (unfollowed, two) = (run(folder, follow=follow) for follow in (True, False))
    assert one == two == "0\n"
    return followed, unfollowed


def values(trace: Trace) -> Values:
    (process,) = summarise(trace).processes
    assert process.values is not None
    return process.values


def test_a_program_that_reads_nothing_known_leaves_the_same_events(
    both: tuple[Trace, Trace],
) -> None:
    one, two = (described(trace.processes[0]) for trace in both)
    assert len(one) > 100
    assert one == two


def test_a_large_copy_to_the_host_is_counted_with_its_place(both: tuple[Trace, Trace]) -> None:
    one, two = map(values, both)
    assert one == two
    assert one.unknown_reads == 1
    assert one.places[0].where == "<string>:9:<module>"
    assert one.places[0].op == "copy to host"


@pytest.mark.usefixtures("cache")
def test_a_program_that_reads_a_value_stops_there(tmp_path: Path) -> None:
    trace, said = run(tmp_path, "read", follow=False)
    assert trace.manifest["exit"]["code"] == READ_UNFOLLOWED
    assert said in ("", "0\n")  # what was in the buffer is lost
