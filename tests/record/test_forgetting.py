"""A recorder that stays for days keeps nothing of requests that are over."""

import os
import threading
import tracemalloc
from pathlib import Path

import torch

from memtrace import record_here, scopes
from memtrace.analysis.accounts import accounts
from memtrace.analysis.identities import check
from memtrace.analysis.places import place
from memtrace.analysis.process import process_memory
from memtrace.record.session import Session
from memtrace.trace.reader import open_trace
from memtrace.trace.schema import Action


def answer(name: str, model: torch.nn.Module) -> None:
    with scopes.request(name, prompt_tokens=8), torch.no_grad():
        for layer in range(20):
            with scopes.phase("prefill"), scopes.layer(layer), scopes.component("Act"):
                model(torch.zeros(2, 8))


def flush() -> None:
    session = Session.active()
    assert session is not None
    session.checkpoint()


def test_the_recorder_doesn_t_grow_with_the_requests(tmp_path: Path) -> None:
    # GIVEN requests that each make a thousand places and contexts of their own
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(10)])
    taken = []
    with record_here(tmp_path / "run"):
        for number in range(40):
            answer(f"r{number}", model)
            if number == 4:
                tracemalloc.start()
            if number in (19, 39):
                flush()
                found = tracemalloc.take_snapshot()
                own = [tracemalloc.Filter(True, f"*{os.sep}memtrace{os.sep}*")]
                taken.append(
                    sum(one.size for one in found.filter_traces(own).statistics("filename"))
                )
    tracemalloc.stop()
    # THEN twenty more of them leave next to nothing in its memory
    assert taken[1] - taken[0] < 100_000
    # AND all of them are in the trace
    trace = open_trace(tmp_path / "run")
    [process] = trace.processes
    [account] = accounts(process)
    named = {place(process, scope).request for scope in set(process.contexts["scope"].tolist())}
    assert {f"r{number}" for number in range(40)} <= named
    assert check(account, process_memory(trace, process)).hold


def test_requests_of_one_name_stay_apart_and_complete(tmp_path: Path) -> None:
    with record_here(tmp_path / "run"):
        for _ in range(3):
            with scopes.request("again"), scopes.component("Act"):
                torch.zeros(1 << 10)
            flush()
    [process] = open_trace(tmp_path / "run").processes
    contexts, context = process.contexts, process.events["context"]
    births = context[contexts["action"][context] == Action.ALLOC]
    places = [place(process, int(contexts["scope"][row])) for row in births]
    assert [one.request for one in places if one.op == "aten.zeros.default"] == ["again"] * 3


def test_who_still_stands_in_a_request_that_is_over_is_booked_where_it_stands(
    tmp_path: Path,
) -> None:
    go, done = threading.Event(), threading.Event()

    def late() -> None:
        go.wait()
        with scopes.phase("decode"):
            torch.zeros(1 << 12)
        done.set()

    with record_here(tmp_path / "run"):
        with scopes.request("first"):
            thread = threading.Thread(target=late)
            thread.start()
        for _ in range(2):
            flush()
        go.set()
        assert done.wait(30)
        thread.join()
    [process] = open_trace(tmp_path / "run").processes
    contexts, events = process.contexts, process.events
    rows = [
        int(row)
        for row, size in zip(events["context"], events["bytes"], strict=True)
        if size == 4 << 12 and contexts["action"][row] == Action.ALLOC
    ]
    [row] = rows
    where = place(process, int(contexts["scope"][row]))
    assert (where.request, where.phase) == ("first", "decode")


def test_a_fork_after_a_request_has_tables_that_name_all_they_need(tmp_path: Path) -> None:
    with record_here(tmp_path / "run"):
        with scopes.request("first"), scopes.component("KV_res/compact"):
            kept = torch.zeros(1 << 12)
        flush()
        child = os.fork()
        if child == 0:
            with scopes.request("in the child"), scopes.component("Act"):
                torch.zeros(1 << 12)
            session = Session.active()
            assert session is not None
            session.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        del kept
    trace = open_trace(tmp_path / "run")
    assert len(trace.processes) == 2
    for process in trace.processes:
        for account in accounts(process):
            assert check(account, process_memory(trace, process)).hold
        names = {place(process, scope).request for scope in range(len(process.scopes["parent"]))}
        assert ("in the child" in names) == (process.pid == child)
