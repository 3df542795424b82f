"""``memtrace classify``: other components from a trace's own evidence, everything else the same."""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace import record_here, scopes
from memtrace.analysis.accounts import Account, accounts
from memtrace.analysis.identities import check
from memtrace.analysis.process import process_memory
from memtrace.classify.relabel import relabel
from memtrace.classify.rules import SCOPES, UserRule, UserRules
from memtrace.classify.runs import classify
from memtrace.cli import main
from memtrace.trace.manifest import read_manifest
from memtrace.trace.reader import Trace, open_trace
from memtrace.trace.schema import TABLES, Action
from tests.record.launching import PYTHON, Launch
from tests.synthetic import LABELS, PID, History, histories, prefill

Classify = Callable[..., Account]


def rule(component: str, *, number: int = 1, **conditions: Any) -> UserRule:
    sizes = {key: conditions.pop(key, None) for key in ("min", "max")}
    globs = {key.rstrip("_"): (value,) for key, value in conditions.items()}
    return UserRule(number, None, component, globs, **sizes)


@pytest.fixture
def classified(tmp_path: Path) -> Classify:
    """The CPU's account of a history under some rules."""

    def run(history: History, *rules: UserRule) -> Account:
        history.write(tmp_path / "run")
        classify(tmp_path / "run", UserRules("my.toml", rules), tmp_path / "out")
        return accounts(open_trace(tmp_path / "out").processes[0])[0]

    return run


def levels(account: Account, component: str) -> list[int]:
    """The bytes of a component after every event."""
    series = account.details.get(component, account.components.get(component))
    assert series is not None, component
    return series.read(np.arange(len(account.process.events["id"]))).tolist()


def allocated(trace: Trace) -> dict[str, list[int]]:
    """Allocated bytes after every event, by device: from the components."""
    return {
        account.device: np.sum([levels(account, name) for name in account.components], 0).tolist()
        for account in accounts(trace.processes[0])
    }


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


GLOBS = st.sampled_from(["*", "prefill", "[0-9]", "1?", "Act", "KV_res/*", "aten.*", "cpu", ""])
RULES = st.lists(
    st.builds(
        UserRule,
        number=st.integers(1, 9),
        name=st.none(),
        component=st.sampled_from([*LABELS, "Temp/mine"]),
        globs=st.dictionaries(
            st.sampled_from([*SCOPES, "stack", "from"]), st.tuples(GLOBS), max_size=2
        ),
        min=st.none() | st.integers(0, 10_000),
        max=st.none() | st.integers(0, 10_000),
    ),
    max_size=4,
)


@settings(max_examples=60)
@given(history=histories(devices=2), rules=RULES)
def test_whatever_the_rules_the_identities_hold_and_nothing_else_changes(
    history: History, rules: list[UserRule]
) -> None:
    with TemporaryDirectory() as scratch:
        run = history.write(Path(scratch) / "run")
        before = files(run)
        classify(run, UserRules("my.toml", tuple(rules)), Path(scratch) / "out")
        assert files(run) == before
        old, new = open_trace(run), open_trace(Path(scratch) / "out")
        for account in accounts(new.processes[0]):
            found = check(account, process_memory(new, new.processes[0], account.device))
            assert found.hold, found.problem
        assert allocated(new) == allocated(old)
        for name in set(TABLES["events"].names) - {"context"}:
            assert np.array_equal(old.processes[0].events[name], new.processes[0].events[name])
        kept = {name: data for name, data in before.items() if "sam" in name or "scopes" in name}
        assert kept.items() <= files(Path(scratch) / "out").items()


def test_rules_that_match_nothing_leave_the_tables_as_they_are(tmp_path: Path) -> None:
    run = prefill().write(tmp_path / "run")
    hits = classify(run, UserRules("my.toml", (rule("Act", op="nothing"),)), tmp_path / "out")
    assert [(hit.events, hit.bytes) for hit in hits] == [(0, 0)]
    old, new = open_trace(run).processes[0], open_trace(tmp_path / "out").processes[0]
    for table in ("events", "contexts", "scopes", "samples", "requests"):
        for name, column in getattr(old, table).items():
            assert list(column) == list(getattr(new, table)[name])


def test_a_process_that_allocated_nothing_is_carried_over(tmp_path: Path) -> None:
    run = History().write(tmp_path / "run")
    classify(run, UserRules("my.toml", (rule("Act", op="x"),)), tmp_path / "out")
    assert len(open_trace(tmp_path / "out").processes[0].events["id"]) == 0


def test_every_kind_of_evidence_can_decide(classified: Classify) -> None:
    history = History()
    with (
        history.scope("request", "q7"),
        history.scope("phase", "prefill"),
        history.scope("layer", "12"),
        history.scope("chunk", "3"),
        history.scope("module", "self_attn"),
        history.scope("class", "LlamaAttention"),
    ):
        for component in ("Act", "Act/inner", "Hidden"):
            history.alloc(1000, component, op="aten.mm.default")
    outer = {"request": "q*", "phase": "pre*", "layer": "1[0-9]", "chunk": "3"}
    inner = {"module": "self_*", "class_": "*Attention", "op": "aten.mm.*", "from_": "Act"}
    found = classified(history, rule("Temp", **outer, **inner))
    assert levels(found, "Temp")[-1] == 2000  # Act stands for Act/inner too
    assert levels(found, "Hidden")[-1] == 1000


@pytest.mark.parametrize(
    "conditions",
    [
        {"request": "q8"},
        {"layer": "1"},
        {"module": "Self_attn"},
        {"module": "attn"},
        {"class_": "self_attn"},
        {"from_": "Temp"},
        {"stack": "*"},
    ],
)
def test_a_condition_that_fails_fails_the_rule(
    classified: Classify, conditions: dict[str, str]
) -> None:
    """Globs match whole texts, case and all; a stack that wasn't recorded matches nothing."""
    history = History()
    with (
        history.scope("request", "q7"),
        history.scope("layer", "12"),
        history.scope("module", "self_attn"),
    ):
        history.alloc(1000, "Act", op="aten.mm.default")
    found = classified(history, rule("Temp", op="aten.mm.default", **conditions))
    assert levels(found, "Act") == [1000]


def test_sizes_are_inclusive_and_the_first_rule_wins(classified: Classify) -> None:
    history = History()
    for size in (99, 100, 200, 201):
        history.alloc(size, "other")
    exact = rule("Act/exact", min=100, max=200)
    found = classified(history, exact, rule("Temp", min=200), rule("Hidden", max=1000))
    assert levels(found, "Act/exact")[-1] == 300
    assert levels(found, "Temp")[-1] == 201
    assert levels(found, "Hidden")[-1] == 99


def test_a_retag_stands_unless_a_rule_matches_it(classified: Classify) -> None:
    history = History()
    with history.scope("module", "mlp"):
        one = history.alloc(1000, "Act")
    with history.scope("module", "store"):
        history.retag(one, "Hidden")
    with history.scope("module", "pack"):
        history.retag(one, "KV_res/full")
    history.free(one)
    found = classified(
        history, rule("Temp", module="mlp"), rule("KV_res/compact", module="pack", from_="KV_res")
    )
    assert levels(found, "Temp") == [1000, 0, 0, 0]
    assert levels(found, "Hidden") == [0, 1000, 0, 0]
    assert levels(found, "KV_res/compact") == [0, 0, 1000, 0]


def test_a_block_that_waits_for_a_stream_leaves_the_component_it_is_in(
    classified: Classify,
) -> None:
    history = History()
    one = history.alloc(1000, "other")
    _, size, _ = history.live.pop(one)
    history.event(Action.FREE_REQUESTED, one, size, "other")
    history.event(Action.FREE_COMPLETED, one, size, "other")
    found = classified(history, rule("Temp", from_="other"))
    assert levels(found, "Temp") == [1000, 0, 0]
    assert levels(found, "other") == [0, 0, 0]


def test_an_address_that_is_used_again_is_another_storage(tmp_path: Path) -> None:
    """So is the same address on another device."""
    history = History()

    def alloc(op: str, device: str) -> None:
        with history.scope("op", op):
            history.event(Action.ALLOC, 7, 10, "Act", device=device)

    alloc("aten.mm", "cuda:0")
    alloc("aten.add", "cuda:1")
    history.event(Action.FREE, 7, 10, "Act", device="cuda:0")
    alloc("aten.add", "cuda:0")
    history.event(Action.FREE, 7, 10, "Act", device="cuda:0")
    run = history.write(tmp_path / "run")
    new = relabel(open_trace(run).processes[0], [rule("Temp", op="aten.mm")])
    labels = [new.contexts["component"][context] for context in new.events["context"]]
    assert labels == ["Temp", "Act", "Temp", "Act", "Act"]


def test_what_the_users_code_chose_wins(tmp_path: Path) -> None:
    with record_here(tmp_path / "run"):
        kept = [torch.zeros(1000)]
        with scopes.phase("mine"), scopes.component("Act"), scopes.layer(0):
            kept.append(torch.zeros(2000))
        scopes.retag(kept[0], "Hidden")
        kept.append(torch.zeros(3000))
    everything = UserRules("my.toml", (rule("Temp", min=0),))
    classify(tmp_path / "run", everything, tmp_path / "out")
    found = accounts(open_trace(tmp_path / "out").processes[0])[0]
    last = {name: int(series.levels[-1]) for name, series in found.components.items()}
    assert (last["Act"], last["Hidden"], last["Temp"]) == (8000, 4000, 12000)


def test_stacks_decide_by_any_of_their_frames(tmp_path: Path) -> None:
    def workspace() -> torch.Tensor:
        return torch.zeros(1000)

    def outer() -> torch.Tensor:
        return workspace()

    with record_here(tmp_path / "run", stacks=8):
        kept = [outer(), torch.zeros(2000)]
    mine = UserRules("my.toml", (rule("Temp", stack="*/test_classify.py:*outer"),))
    classify(tmp_path / "run", mine, tmp_path / "out")
    found = accounts(open_trace(tmp_path / "out").processes[0])[0]
    assert found.components["Temp"].levels[-1] == 4000 == kept[0].nbytes


def test_hostile_globs_end_soon(classified: Classify) -> None:
    history = History()
    history.alloc(1000, "Act", op="a" * 5000)
    globs = ("*a" * 60 + "b", "[z-a]*", "[")
    began = time.process_time()
    found = classified(history, *(rule("Temp", op=glob) for glob in globs))
    assert time.process_time() - began < 5
    assert levels(found, "Act") == [1000]


# -- the command -----------------------------------------------------------------------------


RULES_FILE = """
[[rule]]
name = "workspace"
component = "Act/mm"
op = ["aten.mm", "aten.bmm"]
min = "1 KiB"

[[rule]]
name = "typo"
component = "Temp"
layer = 99
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a run and a file of rules."""
    monkeypatch.chdir(tmp_path)
    prefill().write(tmp_path / "run.memtrace")
    (tmp_path / "my.toml").write_text(RULES_FILE)
    return tmp_path


def test_the_command_says_what_matched(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["classify", "run", "--rules", "my.toml", "-o", "out"]) == 0
    text = capsys.readouterr().out
    assert "rule 1 (workspace)  Act/mm" in text
    assert "rule 2 (typo) matches nothing" in text
    assert main(["report", "out"]) == 0
    assert "Act/mm" in capsys.readouterr().out


def test_the_manifest_says_which_rules_were_applied(here: Path) -> None:
    main(["classify", "run", "--rules", "my.toml", "-o", "once"])
    main(["classify", "once", "--rules", "my.toml", "-o", "twice"])
    old, new = read_manifest(here / "run.memtrace"), read_manifest(here / "twice")
    first, second = new.pop("classified")
    assert (first["run"], second["run"]) == ("run", "once")
    assert first["rules"] == "my.toml"
    assert first["applied"][0]["op"] == ["aten.mm", "aten.bmm"]
    assert first["applied"][0]["events"] == second["applied"][0]["events"] == 12
    changes = {key for key in old | new if old.get(key) != new.get(key)}
    assert changes <= {"files"}


def test_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["classify", "run", "--rules", "my.toml", "-o", "out", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    assert document["run"] == str(here / "out")
    assert document["rules"][0] == {
        "component": "Act/mm",
        "op": ["aten.mm", "aten.bmm"],
        "name": "workspace",
        "min": 1024,
        "events": 12,
        "bytes": 12 * (300 << 10),
    }


def test_a_run_that_never_ended_stays_one(tmp_path: Path) -> None:
    """Without checksums, and with the loss of its torn batch on record."""
    run = prefill().write(tmp_path / "run", complete=False)
    events = run / str(PID) / "events.arrow"
    events.write_bytes(events.read_bytes()[:-40])
    classify(run, UserRules("my.toml", (rule("Temp", op="aten.mm"),)), tmp_path / "out")
    old, new = open_trace(run), open_trace(tmp_path / "out")
    assert not new.complete and new.manifest["state"] == "running"
    assert len(new.processes[0].events["id"]) == len(old.processes[0].events["id"]) > 0
    assert new.manifest["classified"][0]["torn"][f"{PID}/events.arrow"] > 0


@pytest.mark.parametrize("out", ["out", "run.memtrace", "run.memtrace/inner", "no/such/folder"])
def test_a_place_where_no_run_can_be_made_is_refused(
    here: Path, out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "out").mkdir()
    before = files(here)
    assert main(["classify", "run", "--rules", "my.toml", "-o", out]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"memtrace: {out} ") and said.count("\n") == 1
    assert files(here) == before
    assert sorted(path.name for path in here.iterdir()) == ["my.toml", "out", "run.memtrace"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has no rule"),
        ("rule = 3", "has no rule"),
        ("rule = [3]", "rule 1 is no table"),
        ("[[rules]]", "unknown key 'rules'"),
        ("[[rule]", "is not TOML"),
        ("[[rule]]\nop = 'x'", "rule 1 has no component"),
        ("[[rule]]\ncomponent = 'Act'", "rule 1 has no condition"),
        ("[[rule]]\ncomponent = 'Akt'\nop = 'x'", "rule 1 has a wrong component: 'Akt'"),
        ("[[rule]]\nname = 'a'\ncomponent = 'Act'\nmodul = 'x'", "rule 1 (a) has the unknown key"),
        ("[[rule]]\ncomponent = 'Act'\nop = 1.5", "rule 1 has a 'op' that is neither"),
        ("[[rule]]\ncomponent = 'Act'\nop = []", "rule 1 has a 'op' that is neither"),
        ("[[rule]]\ncomponent = 'Act'\nmin = '3 lots'", "rule 1 has a wrong 'min': '3 lots'"),
        ("[[rule]]\ncomponent = 'Act'\nmin = 2\nmax = 1", "rule 1 can't match: 2 B at least"),
        ("[[rule]]\ncomponent = 'Act'\nname = 3\nop = 'x'", "rule 1 has a name that is no text"),
        ("x = " + "[" * 5000, "is not TOML"),
        (b"\xff\xfe", "is not TOML"),
        (None, "can't be read"),
    ],
)
def test_a_wrong_file_of_rules_is_refused_in_a_sentence(
    here: Path, content: str | bytes | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = here / "my.toml"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert main(["classify", "run", "--rules", "my.toml", "-o", "out"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("memtrace: my.toml") and said in error and error.count("\n") == 1
    assert not (here / "out").exists()


# -- while recording -------------------------------------------------------------------------


SCRIPT = "import torch; kept = [torch.ones(1000), torch.ones(10) + 1]"


def test_recording_with_rules_is_recording_and_then_classifying(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(
        "[[rule]]\ncomponent = 'Temp'\nmin = 4000\n[[rule]]\ncomponent = 'Act'\nlayer = 1\n"
    )
    launch = Launch(tmp_path, PYTHON, "-c", SCRIPT, options=("--rules", "my.toml"))
    done = launch.run()
    assert done.returncode == 0
    assert "memtrace: rule 2 matches nothing" in done.stderr
    trace = launch.trace()
    assert trace.complete and trace.manifest["classified"][0]["run"] == "run"
    found = accounts(trace.processes[0])[0]
    assert found.components["Temp"].peak == 4000
    assert found.components["other"].peak == 2 * 40
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_run_that_is_still_written_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("[[rule]]\ncomponent = 'Temp'\nmin = 0\n")
    code = "import os, sys; os.fork() or sys.stdin.read()"
    launch = Launch(tmp_path, PYTHON, "-c", code, options=("--rules", "my.toml"))
    with launch.start() as running:
        assert running.stderr is not None
        said = running.stderr.readline()
    assert said.startswith("memtrace: processes still write the run, so no rules were applied")
    assert "classified" not in launch.trace().manifest


def test_a_wrong_file_of_rules_stops_the_recording_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("[[rule]]\n")
    launch = Launch(tmp_path, "touch", "ran", options=("--rules", "my.toml"))
    done: subprocess.CompletedProcess[str] = launch.run()
    assert done.returncode == 125
    assert done.stderr.startswith("memtrace: my.toml: rule 1 has no component")
    assert not (tmp_path / "ran").exists() and not launch.folder.exists()
