"""What ``report`` and ``compare`` print, through the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from memtrace.cli import main
from memtrace.components import TENSOR_COMPONENTS
from tests.synthetic import PID, History, prefill

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def snapkv(tmp_path: Path) -> Path:
    return prefill(scale=9).write(tmp_path / "snapkv.memtrace")


@pytest.fixture
def tide(tmp_path: Path) -> Path:
    return prefill(scale=1).write(tmp_path / "tide.memtrace")


def printed(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main([str(word) for word in argv]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def document(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    found = json.loads(printed(capsys, *argv, "--json"))
    assert found["schema"] == 1
    return dict(found)


def test_report_prints_both_equations(tide: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "report", tide).partition("above the steady")[0].splitlines()
    rows = {line.split()[0]: line for line in (line.replace("■", "") for line in lines) if line}
    assert rows["KV_res"].split()[1:] == ["896.0", "KiB", "16.3", "%", "1.0", "MiB"]
    assert rows["KV_res/full"].split()[1:] == ["512.0", "KiB", "9.3", "%", "512.0", "KiB"]
    assert rows["M_live"].split()[1:7] == ["1.4", "MiB", "25.3", "%", "1.4", "MiB"]
    assert rows["allocated"].split()[1:7] == ["5.4", "MiB", "100.0", "%", "5.4", "MiB"]
    assert "no caching allocator" in rows["allocator"]
    assert rows["process"].split()[1:5] == ["85.3", "MiB", "86.3", "MiB"]


def test_report_says_what_ran_and_where_the_peak_stood(
    tide: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = printed(capsys, "report", tide)
    assert "python infer.py" in out
    assert f"measured, on cpu, process {PID}, torch 2.14.1" in out
    assert "54, none dropped" in out
    assert "hold at all 54 events" in out
    assert "complete; exit code 0" in out
    assert "request q1 > prefill > layer 3 > chunk 0 > aten.mm" in out
    assert "scratch memory of kernels" in out


def test_output_fits_80_columns_and_has_no_colour_in_a_pipe(
    snapkv: Path, tide: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv in (("report", tide), ("compare", snapkv, tide)):
        out = printed(capsys, *argv)
        assert max(map(len, out.splitlines())) <= 80
        assert "\x1b" not in out
        assert "…" not in out


def test_report_limits_the_allocations_to_top(
    tide: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(document(capsys, "report", tide, "--top", 2)["top"]) == 2
    assert "live at the peak" not in printed(capsys, "report", tide, "--top", 0)


def test_report_as_json_has_the_documented_keys(
    tide: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = document(capsys, "report", tide)
    peak = found["peak"]
    assert peak["allocated"] == sum(peak["components"].values()) == 5615616
    assert tuple(peak["components"]) == TENSOR_COMPONENTS
    assert peak["at"] == {
        "event": 38,
        "time_us": 39000,
        "request": "q1",
        "phase": "prefill",
        "layer": 3,
        "chunk": 0,
        "module": None,
        "op": "aten.mm",
        "tag": None,
    }
    assert peak["allocated"] + peak["allocator"] + peak["external"] == peak["process"]
    assert found["own_peak"]["KV_res"] == MIB
    assert found["process"] == {
        "peak": 86 * MIB + 300 * KIB,
        "source": "rss",
        "exact": True,
        "missing": None,
    }
    assert (found["events"], found["dropped"], found["knowledge"]) == (54, 0, "measured")
    assert found["identities"] == {"hold": True, "events": 54, "problem": None}
    assert found["above_steady"] == 876 * KIB


def test_every_key_of_the_json_documents_is_documented(
    snapkv: Path, tide: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
    report = document(capsys, "report", tide)
    for part in (report, report["peak"], report["top"][0], report["process"]):
        assert [key for key in part if f"`{key}`" not in text] == []
    comparison = document(capsys, "compare", snapkv, tide)
    for part in (comparison, comparison["differences"][0]):
        assert [key for key in part if f"`{key}`" not in text] == []


def test_an_inconsistent_trace_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = prefill()
    history.event(1, 999, 100, "Act")
    out = printed(capsys, "report", history.write(tmp_path / "run"))
    assert "inconsistent: storage 999 is freed or retagged while it isn't live" in out
    assert "hold at all" not in out


def test_a_run_without_tensors_still_tells_process_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = History()
    history.sample("rss", 9 * MIB)
    run = history.write(tmp_path / "run", process={"torch": None, "unseen": []})
    out = printed(capsys, "report", run)
    assert "No tensor was seen. Peak process memory: 9.0 MiB." in out
    assert "torch was never imported" in out
    found = document(capsys, "report", run)
    assert (found["peak"], found["top"]) == (None, [])
    assert found["process"]["peak"] == 9 * MIB


def test_a_run_in_which_no_recorder_started_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = prefill().write(tmp_path / "run", complete=False)
    for file in (run / str(PID)).iterdir():
        file.unlink()
    assert "No tensor was seen" in printed(capsys, "report", run)
    assert document(capsys, "report", run)["process"]["peak"] is None


def test_a_killed_recorder_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = prefill().write(tmp_path / "run", complete=False)
    events = run / str(PID) / "events.arrow"
    events.write_bytes(events.read_bytes()[:-200])
    out = printed(capsys, "report", run)
    assert "the recorder was killed or still runs" in out
    assert "after the last whole batch dropped" in " ".join(out.split())
    found = document(capsys, "report", run)
    assert found["events"] == 27  # the first of two batches
    assert 0 < found["torn"][str(events)] < events.stat().st_size


def test_names_that_look_like_markup_are_printed_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = prefill()
    history.request("[/bold] :smile:", 1)
    run = history.write(tmp_path / "run", manifest={"command": ["[red]x[/blue]"]})
    out = printed(capsys, "report", run)
    assert "[red]x[/blue]" in out
    assert "[/bold] :smile:" in out


def test_compare_prints_differences_and_verdicts(
    snapkv: Path, tide: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = " ".join(printed(capsys, "compare", snapkv, tide).replace("■", "").split())
    assert "Act 2.6 MiB 300.0 KiB -2.3 MiB -88.9 %" in out
    assert "above the steady state 3.2 MiB 876.0 KiB -2.3 MiB -73.3 %" in out
    assert "tide peaks at 5.4 MiB allocated, 2.3 MiB (30.4 %) below snapkv" in out
    assert "its process peaks at 86.3 MiB, 2.3 MiB below that of snapkv." in out
    assert "At the peaks Act (-2.3 MiB) makes the difference." in out
    assert "Of the Act of snapkv 2.6 MiB are made in prefill > layer 3." in out
    assert "takes 876.0 KiB where snapkv takes 3.2 MiB, 3.7 times less." in out


def test_compare_the_other_way_round_says_more(
    snapkv: Path, tide: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = " ".join(printed(capsys, "compare", tide, snapkv).split())
    assert "2.3 MiB (43.8 %) above tide" in out
    assert "3.7 times more" in out


def test_compare_of_a_run_with_itself_finds_nothing(
    tide: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = document(capsys, "compare", tide, tide)
    [difference] = found["differences"]
    assert set(difference["at_peak"].values()) == set(difference["own_peak"].values()) == {0}
    assert "as much as" in found["verdicts"][0]
    assert found["warnings"] == []


def test_compare_takes_three_runs_and_as_json_subtracts_the_first(
    snapkv: Path, tide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    third = prefill(scale=2).write(tmp_path / "third.memtrace")
    found = document(capsys, "compare", snapkv, tide, third)
    assert [run["name"] for run in found["runs"]] == ["snapkv", "tide", "third"]
    assert [(d["run"], d["at_peak"]["Act"]) for d in found["differences"]] == [
        ("tide", -8 * 300 * KIB),
        ("third", -7 * 300 * KIB),
    ]
    assert "third" in printed(capsys, "compare", snapkv, tide, third)


def test_compare_warns_when_runs_are_not_comparable(
    tide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = History()
    history.alloc(10, "Act", device="cuda:0")
    history.event(1, 999, 100, "Act", device="cuda:0")
    other = history.write(
        tmp_path / "other",
        complete=False,
        manifest={"knowledge": "modelled"},
        process={"dropped": 3},
    )
    assert document(capsys, "compare", tide, other)["warnings"] == [
        "The runs are known in different ways: tide measured, other modelled.",
        "The runs are on different devices: tide cpu, other cuda:0.",
        "other is inconsistent: storage 999 is freed or retagged while it isn't live at event 1.",
        "other dropped 3 events.",
        "other is not complete: its recorder was killed or still runs.",
    ]


def test_compare_refuses_a_run_without_tensors(
    tide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = History().write(tmp_path / "empty")
    assert main(["compare", str(tide), str(empty), "--json"]) == 1
    out, err = capsys.readouterr()
    assert err == "memtrace: empty saw no tensor, so there is nothing to compare\n"
    assert json.loads(out) == {"schema": 1, "error": err[len("memtrace: ") :].strip()}


def test_runs_of_one_name_are_told_apart_by_their_folders(
    tide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = prefill().write(tmp_path / "again" / "tide.memtrace")
    [difference] = document(capsys, "compare", tide, again)["differences"]
    assert (difference["baseline"], difference["run"]) == (str(tide), str(again))
