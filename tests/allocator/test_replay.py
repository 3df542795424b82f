"""Replaying a run under another allocator: the new run is one that a replay confirms."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memtrace.allocator.ops import Op
from memtrace.allocator.replay import write_replay
from memtrace.allocator.settings import Settings
from memtrace.allocator.simulation import Setup, simulate, smallest_memory
from memtrace.allocator.stream_ordered import bounds
from memtrace.allocator.verify import verify_run
from memtrace.analysis.accounts import accounts
from memtrace.analysis.identities import check
from memtrace.analysis.process import process_memory
from memtrace.analysis.recorded import replayable, setup_of
from memtrace.cli import main
from memtrace.trace.manifest import file_checksums, write_manifest
from memtrace.trace.reader import Trace, open_trace
from memtrace.trace.schema import Action
from tests.synthetic import History, histories, prefill

MiB = 1 << 20
NO_CHECK = [HealthCheck.function_scoped_fixture]
CONFS = ("", "expandable_segments:True", "roundup_power2_divisions:4", "max_split_size_mb:20")


def replayed(run: Path, out: Path, setup: Setup, conf: str = "") -> Trace:
    trace = open_trace(run)
    parsed = Settings.parse(conf, setup.torch)
    requests = replayable(trace)
    setups = [replace(setup, settings=parsed)] * len(requests)
    write_replay(trace, requests, setups, conf, out)
    return open_trace(out)


def big(history: History) -> History:
    """The same history with blocks of a size that makes an allocator work."""
    history.rows["events"] = [
        (time, number, (size + 1) * 1000, (size + 1) * 1000, context)
        for time, number, size, _, context in history.rows["events"]
    ]
    return history


# -- the new run ---------------------------------------------------------------------------------


@given(history=histories(), conf=st.sampled_from(CONFS), minor=st.sampled_from([11, 12, 13, 15]))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_history_replays_to_a_run_that_a_replay_confirms(
    history: History, conf: str, minor: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    big(history).write(folder / "cpu.memtrace")
    trace = replayed(
        folder / "cpu.memtrace", folder / "out.memtrace", Setup(torch=(2, minor)), conf
    )
    (found,) = verify_run(trace)
    assert found.difference is None
    assert found.equal == found.events
    (account,) = accounts(trace.processes[0])
    identities = check(account, process_memory(trace, account.process, account.device))
    assert identities.hold, identities.problem
    assert trace.manifest["knowledge"] == "modelled"


@given(history=histories())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_components_scopes_and_requested_bytes_stay(
    history: History, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    big(history).write(folder / "cpu.memtrace")
    trace = replayed(folder / "cpu.memtrace", folder / "out.memtrace", Setup())

    def story(process: Any) -> list[tuple[Any, ...]]:
        contexts, events = process.contexts, process.events
        names = ("action", "component", "previous", "scope")
        return [
            (int(requested), int(time), *(contexts[name][context] for name in names))
            for context, requested, time in zip(
                events["context"], events["requested"], events["time_us"], strict=True
            )
            if contexts["action"][context] in (Action.ALLOC, Action.FREE)
        ]

    source = open_trace(folder / "cpu.memtrace")
    assert story(trace.processes[0]) == story(source.processes[0])


def test_a_prefill_on_a_card(tmp_path: Path) -> None:
    """Numbers of one small run by hand: 7 blocks of 1 MiB and below share segments of 2 MiB."""
    history = History()
    for _ in range(3):
        history.alloc(MiB, "model")
    kept = history.alloc(3 * MiB, "KV_res/full")
    history.retag(kept, "KV_res/compact")
    history.write(tmp_path / "run.memtrace")
    trace = replayed(tmp_path / "run.memtrace", tmp_path / "out.memtrace", Setup())
    (account,) = accounts(trace.processes[0])
    assert account.device == "cuda:0"
    assert account.reserved is not None
    assert account.reserved.peak == 2 * 2 * MiB + 20 * MiB
    assert account.components["model"].peak == 3 * MiB
    assert account.details["KV_res/compact"].peak == 3 * MiB


def test_what_fails_is_left_out_and_counted(tmp_path: Path) -> None:
    history = History()
    small = history.alloc(30 * MiB, "model")
    large = history.alloc(80 * MiB, "Act")
    history.retag(large, "Temp")
    history.free(large)
    history.free(small)
    history.write(tmp_path / "run.memtrace")
    trace = replayed(tmp_path / "run.memtrace", tmp_path / "out.memtrace", Setup(total=100 * MiB))
    (account,) = accounts(trace.processes[0])
    assert account.allocated.peak == 30 * MiB
    actions = account.process.contexts["action"][account.process.events["context"]].tolist()
    assert actions.count(Action.OOM) == 1
    assert actions.count(Action.RETRY) == 1
    assert Action.RETAG not in actions
    assert verify_run(trace)[0].difference is None


def test_the_smallest_memory_is_enough_and_less_is_not(tmp_path: Path) -> None:
    big(prefill(layers=6, chunks=4)).write(tmp_path / "run.memtrace")
    (requests,) = replayable(open_trace(tmp_path / "run.memtrace"))
    for conf in CONFS:
        setup = Setup(Settings.parse(conf), outside=64 * MiB)
        memory = smallest_memory(requests, setup)
        assert memory is not None
        assert simulate(requests, replace(setup, total=memory)).fits
        assert not simulate(requests, replace(setup, total=memory - 2 * MiB)).fits


@pytest.mark.parametrize(
    ("conf", "fraction"),
    [
        ("per_process_memory_fraction:0.5", None),
        ("expandable_segments:True,per_process_memory_fraction:0.3", None),
        ("expandable_segments:True,expandable_segments_reserve:0.1", None),
        ("garbage_collection_threshold:0.6", 0.7),
        ("", 0.5),
    ],
)
def test_a_share_of_the_smallest_memory_is_enough(
    conf: str, fraction: float | None, tmp_path: Path
) -> None:
    big(prefill(layers=6, chunks=4)).write(tmp_path / "run.memtrace")
    (requests,) = replayable(open_trace(tmp_path / "run.memtrace"))
    setup = Setup(Settings.parse(conf), outside=64 * MiB, fraction=fraction)
    memory = smallest_memory(requests, setup)
    assert memory is not None
    assert simulate(requests, replace(setup, total=memory)).fits
    assert not simulate(requests, replace(setup, total=memory - 2 * MiB)).fits


def test_a_request_that_failed_is_asked_again(tmp_path: Path) -> None:
    history = History()
    history.alloc(2 * MiB, "model", device="cuda:0")
    history.event(Action.SEGMENT_ALLOC, 0x7000, 20 * MiB, None, device="cuda:0")
    history.event(Action.OOM, 4 * MiB, 50 * MiB, None, device="cuda:0")
    history.alloc(MiB, "Act", device="cuda:0")
    cuda = {
        "cuda": {"devices": [{"ordinal": 0, "name": "x", "uuid": "y", "total_memory": 40 * MiB}]}
    }
    history.write(tmp_path / "run.memtrace", process=cuda)
    trace = open_trace(tmp_path / "run.memtrace")
    (requests,) = replayable(trace)
    setup = setup_of(trace, trace.processes[0], "cuda:0")
    assert setup.total == 40 * MiB
    assert setup.outside == (40 - 4 - 20) * MiB  # neither free nor reserved when it failed
    assert simulate(requests, setup).failures == 1
    enough = simulate(requests, replace(setup, total=100 * MiB))
    assert enough.fits
    assert enough.allocated_peak == 52 * MiB  # at once given back: the program never had it


@pytest.mark.parametrize(
    ("settings", "returned", "emptied"),
    [
        ({"max_split_size": 40 * MiB}, [(Action.SEGMENT_FREE, 40 * MiB)], False),
        ({"max_split_size": 40 * MiB}, [(Action.SEGMENT_FREE, 20 * MiB)], True),
        ({"garbage_collection_threshold": 0.5}, [(Action.SEGMENT_FREE, 20 * MiB)], False),
        (
            {"garbage_collection_threshold": 0.5},
            [(Action.SEGMENT_FREE, 20 * MiB), (Action.SEGMENT_FREE, 2 * MiB)],
            True,
        ),
        ({"garbage_collection_threshold": 0.5}, [(Action.SEGMENT_UNMAP, 20 * MiB)], True),
        ({}, [(Action.SEGMENT_FREE, 40 * MiB)], True),
    ],
)
def test_what_the_allocator_cant_have_given_back_by_itself_is_an_emptied_cache(
    settings: dict[str, Any], returned: list[tuple[Action, int]], emptied: bool, tmp_path: Path
) -> None:
    history = History()
    for number, (action, size) in enumerate(returned):
        history.event(action, number * 100 * MiB, size, None, device="cuda:0")
    history.event(Action.SEGMENT_ALLOC, 900 * MiB, 20 * MiB, None, device="cuda:0")
    history.alloc(20 * MiB, "other", device="cuda:0")
    history.write(tmp_path / "run.memtrace", process={"allocator_settings": settings})
    (requests,) = replayable(open_trace(tmp_path / "run.memtrace"))
    assert (Op.EMPTY_CACHE in requests.ops.kind.tolist()) is emptied


def test_another_devices_private_pools_are_not_this_ones(tmp_path: Path) -> None:
    history = History()
    history.event(Action.ALLOC, 1, MiB, "other", device="cuda:0", pool="0.1")
    history.event(Action.ALLOC, 2, MiB, "other", device="cuda:1", pool="0.2")
    history.event(Action.ALLOC, 3, MiB, "other", device="cuda:2")
    history.write(tmp_path / "run.memtrace")
    found = {one.device: one.pools for one in replayable(open_trace(tmp_path / "run.memtrace"))}
    assert found == {"cuda:0": ("0.1",), "cuda:1": ("0.2",), "cuda:2": ()}


# -- bounds --------------------------------------------------------------------------------------


def test_bounds_of_the_stream_ordered_allocator(tmp_path: Path) -> None:
    history = History()
    for stream in (0, 1):  # one after the other, on two streams
        number = 10 + stream
        rows = {"device": "cuda:0", "stream": stream}
        history.event(Action.ALLOC, number, 40 * MiB, "Act", requested=40 * MiB - 5, **rows)
        history.event(Action.FREE, number, 40 * MiB, "Act", requested=40 * MiB - 5, **rows)
    history.write(tmp_path / "run.memtrace")
    (requests,) = replayable(open_trace(tmp_path / "run.memtrace"))
    found = bounds(requests, Setup(total=100 * MiB))
    assert found.requested_peak == 40 * MiB - 5
    assert found.least == 64 * MiB
    assert found.most == 128 * MiB
    assert found.fits is None
    assert bounds(requests, Setup(total=30 * MiB)).fits is False
    assert bounds(requests, Setup(total=130 * MiB)).fits is True
    assert bounds(requests, Setup(total=130 * MiB, pool=30 * MiB)).fits is False


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return big(prefill()).write(tmp_path / "prefill.memtrace")


def test_settings_are_ranked(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), "--sweep", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    memory = [trial["smallest_memory"] for trial in document["trials"]]
    assert memory == sorted(memory)
    assert {"as recorded", "expandable_segments:True"} <= {
        trial["settings"] for trial in document["trials"]
    }
    assert main(["replay", str(run), "--sweep"]) == 0
    text = capsys.readouterr().out
    best = document["trials"][0]["settings"]
    assert f"export PYTORCH_CUDA_ALLOC_CONF={best}" in text
    assert "without a limit" in text


def test_a_card_and_a_version(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["replay", str(run), "--device", "rtx-4090-24g", "--torch", "2.11", "--json"]
    assert main(argv) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["torch"] == "2.11"
    assert document["total"] > 20 << 30
    assert [trial["settings"] for trial in document["trials"]] == ["as recorded"]


def test_conf_may_be_repeated(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["replay", str(run), "--conf", CONFS[1], "--conf", CONFS[2], "--json"]
    assert main(argv) == 0
    found = {one["settings"] for one in json.loads(capsys.readouterr().out)["trials"]}
    assert found == {"as recorded", *CONFS[1:3]}


def test_settings_that_fit_no_device(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["replay", str(run), "--conf", "per_process_memory_fraction:0"]
    assert main([*argv, "--json"]) == 0
    best, worst = json.loads(capsys.readouterr().out)["trials"]
    assert best["settings"] == "as recorded"
    assert worst["smallest_memory"] is None
    assert main(argv) == 0
    assert "none" in capsys.readouterr().out


def test_the_line_to_export_is_one_for_the_shell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = History()
    history.alloc(33 * MiB, "model")
    halves = {"allocator_settings": {"roundup_power2_divisions": {"32": 2}}}
    history.write(tmp_path / "run.memtrace", process=halves)
    conf = "roundup_power2_divisions:[32:4,>:8]"
    assert main(["replay", str(tmp_path / "run.memtrace"), "--conf", conf]) == 0
    assert f"export PYTORCH_CUDA_ALLOC_CONF='{conf}'" in capsys.readouterr().out


def test_a_run_is_written(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.memtrace"
    argv = ["replay", str(run), "--allocator", "expandable", "--memory", "8 GiB", "-o", str(out)]
    assert main(argv) == 0
    assert "reserved at most" in capsys.readouterr().out
    assert open_trace(out).manifest["replayed"]["settings"] == "expandable_segments:True"
    assert main(["replay", str(out), "--verify"]) == 0
    assert "events equal" in capsys.readouterr().out
    assert main(["report", str(out)]) == 0


def test_each_card_keeps_its_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = History()
    history.alloc(30 * MiB, "model", device="cuda:0")
    history.alloc(60 * MiB, "model", device="cuda:1")
    devices = [
        {"ordinal": number, "name": "x", "uuid": str(number), "total_memory": total * MiB}
        for number, total in enumerate((40, 80))
    ]
    history.write(tmp_path / "run.memtrace", process={"cuda": {"devices": devices}})
    out = tmp_path / "out.memtrace"
    assert main(["replay", str(tmp_path / "run.memtrace"), "-o", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [one["failures"] for one in document["devices"]] == [0, 0]
    cards = open_trace(out).processes[0].manifest["cuda"]["devices"]
    assert {one["ordinal"]: one["total_memory"] for one in cards} == {0: 40 * MiB, 1: 80 * MiB}


def test_a_virtual_card_is_known_without_its_allocator(tmp_path: Path) -> None:
    history = History()
    history.alloc(30 * MiB, "model", device="cuda:0")
    cards = {"virtual_gpu": {"devices": [{"total": 40 * MiB, "context": 2 * MiB}]}}
    history.write(tmp_path / "run.memtrace", manifest=cards)
    trace = open_trace(tmp_path / "run.memtrace")
    setup = setup_of(trace, trace.processes[0], "cuda:0")
    assert (setup.total, setup.outside) == (40 * MiB, 2 * MiB)


def test_of_several_processes_the_largest_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, size in (("small", 2 * MiB), ("large", 200 * MiB)):
        history = History()
        history.alloc(size, "model", device="cuda:0")
        history.write(tmp_path / name)
    process = next(one for one in (tmp_path / "large").iterdir() if one.is_dir())
    process.rename(tmp_path / "small" / f"{process.name}-1")
    root = json.loads((tmp_path / "small" / "manifest.json").read_text())
    kept = {name: root[name] for name in ("state", "knowledge", "command", "exit")}
    write_manifest(tmp_path / "small", kept | {"files": file_checksums(tmp_path / "small")})
    assert main(["replay", str(tmp_path / "small"), "--json"]) == 0
    (trial,) = json.loads(capsys.readouterr().out)["trials"]
    assert trial["allocated_peak"] == 200 * MiB


def test_verification_finds_a_changed_event(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = replayed(run, tmp_path / "out.memtrace", Setup())
    process = trace.processes[0]
    history = History()
    for table in ("scopes", "contexts", "events"):
        columns = getattr(process, table)
        history.rows[table] = list(zip(*(list(one) for one in columns.values()), strict=True))
    time, address, size, requested, context = map(int, history.rows["events"][-1])
    history.rows["events"][-1] = time, address + 512, size, requested, context
    changed = history.write(tmp_path / "changed.memtrace", process={"replayed": ""})
    assert main(["replay", str(changed), "--verify", "--json"]) == 1
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert device["equal"] == device["events"] - 1
    assert "where nothing lives" in device["difference"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--conf", "max_split_size_mb:1"], "at least 20"),
        (["--conf", "nonsense:1"], "no setting of torch"),
        (["--conf", "expandable_segments:yes"], "True or False"),
        (["--torch", "1.13"], "oldest is 2.1"),
        (["--torch", "new"], "not a version"),
        (["--memory", "lots"], "not a size"),
        (["--memory", "0"], "without memory"),
        (["--device", "abacus"], "abacus"),
        (["--allocator", "async", "--conf", ""], "bounds only"),
        (["--conf", "backend:cudaMallocAsync"], "--allocator async"),
        (["--conf", CONFS[1], "--conf", CONFS[2], "-o", "x"], "one --conf"),
        (["--device", "l4-24g,a100-40g"], "takes one card"),
        (["--verify"], "no segments"),
        (["--verify", "--conf", CONFS[1]], "own settings"),
        (["--verify", "--device", "l4-24g"], "own settings"),
    ],
)
def test_bad_requests_get_one_sentence(
    run: Path, argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(run), *argv]) == 1
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_nothing_to_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    History().write(tmp_path / "empty.memtrace")
    assert main(["replay", str(tmp_path / "empty.memtrace")]) == 1
    assert "no allocations" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [[], "x", {"max_split_size": "x"}, {"roundup_power2_divisions": [1]}, {"max_split_size": None}],
)
def test_settings_of_a_wrong_type_are_damage(
    tmp_path: Path, wrong: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    history = History()
    history.alloc(MiB, "model")
    run = history.write(tmp_path / "run.memtrace", process={"allocator_settings": wrong or [0]})
    assert main(["replay", str(run)]) == 1
    assert "is damaged: its allocator_settings" in capsys.readouterr().err


def test_what_is_there_stays(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), "-o", str(run)]) == 1
    assert "is there already" in capsys.readouterr().err
    assert open_trace(run).complete


def test_an_interrupted_replay_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("memtrace.allocator.replay.file_checksums", interrupt)
    before = set(tmp_path.iterdir())
    assert main(["replay", str(run), "-o", str(tmp_path / "out.memtrace")]) == 130
    assert set(tmp_path.iterdir()) == before


def test_frees_of_unknown_blocks_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = History()
    history.alloc(MiB, "model")
    history.event(Action.FREE, 99, MiB, "model")
    history.write(tmp_path / "run.memtrace")
    assert main(["replay", str(tmp_path / "run.memtrace")]) == 0
    assert "1 frees of unknown blocks" in capsys.readouterr().out


@pytest.mark.parametrize("again", [Action.FREE, Action.FREE_REQUESTED])
@pytest.mark.parametrize("first", [Action.FREE, Action.FREE_REQUESTED])
def test_what_was_freed_isnt_freed_again(
    first: Action, again: Action, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = History()
    for action in (Action.ALLOC, first, again, Action.FREE_COMPLETED, Action.ALLOC, first):
        history.event(action, 1, MiB, "model")
    history.write(tmp_path / "run.memtrace")
    assert main(["replay", str(tmp_path / "run.memtrace")]) == 0
    assert "1 frees of unknown blocks" in capsys.readouterr().out


def test_a_request_for_negative_bytes_is_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = History()
    history.event(Action.ALLOC, 1, MiB, "model", requested=-5)
    history.write(tmp_path / "run.memtrace")
    assert main(["replay", str(tmp_path / "run.memtrace")]) == 1
    said = capsys.readouterr().err
    assert "negative bytes" in said and said.count("\n") == 1


def test_arrays_stay_small(run: Path) -> None:
    """Operations of ten million events have to fit into memory beside them."""
    (requests,) = replayable(open_trace(run))
    ops = requests.ops
    per_row = sum(one.itemsize for one in (ops.kind, ops.block, ops.size, ops.stream, ops.pool))
    assert per_row <= 32
    assert np.all(np.diff(requests.event) >= 0)
