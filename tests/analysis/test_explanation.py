"""``memtrace explain``: what it says of runs whose end is known, and of what it can't explain."""

import json
from pathlib import Path

import pytest

from memtrace.analysis.explanation import Explanation, explain
from memtrace.analysis.failure import Kind
from memtrace.cli import main
from memtrace.trace.reader import open_trace
from memtrace.trace.schema import Action
from tests.analysis.simulated import CUDA, MiB, Program
from tests.analysis.test_failure import CASES
from tests.synthetic import History, prefill


def explained(program: Program, folder: Path, *, replay: bool = True) -> Explanation:
    return explain(open_trace(program.write(folder / "run")), replay=replay)


def wasted() -> Program:
    """Segments of 20 MiB with two blocks of 8 MiB each: a fifth can't be used."""
    program = Program(2000 * MiB)
    with program.history.scope("phase", "prefill"):
        for _ in range(230):
            program.alloc(8 * MiB, "KV_res")
    return program


@pytest.mark.parametrize("kind", CASES)
def test_the_command_gives_the_verdict(
    tmp_path: Path, kind: Kind, capsys: pytest.CaptureFixture[str]
) -> None:
    run = CASES[kind]().write(tmp_path / "run")
    assert main(["explain", str(run), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["verdict"], document["sure"]) == (1, kind, True)
    assert document["help"]
    memory = document["memory"]
    held = ("allocated", "pending", "hard", "releasable", "private")
    assert sum(memory[name] for name in held) == memory["reserved"]
    assert main(["explain", str(run)]) == 0
    text = capsys.readouterr().out
    assert f"\n{kind}\n" in text and "\x1b" not in text
    assert "what would help, cheapest first" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_settings_are_tried_on_the_same_requests(tmp_path: Path) -> None:
    found = explained(wasted(), tmp_path)
    assert found.oom is not None and found.oom.kind is Kind.FRAGMENTED
    assert found.trials is not None and found.trials.distrust is None
    assert found.trials.own.avoids is False
    avoids = {trial.settings: trial.avoids for trial in found.trials.others}
    assert avoids["expandable_segments:True"] is True
    assert avoids["max_split_size_mb:64"] is False
    assert found.help[0].startswith("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: ")


def test_without_a_replay_nothing_is_claimed_of_settings(tmp_path: Path) -> None:
    found = explained(wasted(), tmp_path, replay=False)
    assert found.trials is None
    assert found.help[0].endswith("is made for that; it wasn't replayed.")


def test_a_fraction_is_raised_to_what_is_needed(tmp_path: Path) -> None:
    found = explained(CASES[Kind.FRACTION](), tmp_path)
    # 2,000 MiB are reserved of 2,048 that are allowed; 200 more are wanted, of 8,192.
    assert "set_per_process_memory_fraction(0.269)" in found.help[0]


def test_memory_of_others_is_told_apart(tmp_path: Path) -> None:
    found = explained(CASES[Kind.EXHAUSTED](), tmp_path)
    assert any(text.startswith("Stop what else uses the device: 300.0 MiB") for text in found.help)
    assert any("Hold at least 52.0 MiB less" in text for text in found.help)


def test_a_pending_block_is_had_by_asking_again(tmp_path: Path) -> None:
    found = explained(CASES[Kind.PENDING](), tmp_path)
    assert found.help[0] == "Catch the error and ask again: by then the block is free."
    assert found.clearing is None and found.trials is None


def test_a_run_without_a_failure_says_what_is_held_for_nothing(tmp_path: Path) -> None:
    program = Program(4000 * MiB)
    with program.history.scope("phase", "prefill"):
        blocks = [program.alloc(8 * MiB) for _ in range(100)]
        program.free(blocks[0])
    program.free(program.alloc(30 * MiB))
    found = explained(program, tmp_path)
    assert found.oom is None
    assert found.parts.reserved == 1030 * MiB
    # At the peak of reserved nothing but the ends of segments is free.
    assert (found.parts.hard, found.parts.releasable) == (208 * MiB, 0)
    assert "208.0 MiB are hard fragmentation (20.2 % of what is reserved)" in found.words
    assert found.hard_peak is not None and found.hard_peak.bytes == 208 * MiB
    assert found.help[0].startswith("export PYTORCH_CUDA_ALLOC_CONF=")


def test_the_last_of_several_failures_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = Program(1000 * MiB)
    program.alloc(2000 * MiB)
    program.alloc(600 * MiB, "model")
    program.alloc(500 * MiB)
    run = program.write(tmp_path / "run")
    assert main(["explain", str(run), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["failures"] == 2
    assert document["request"]["bytes"] == 500 * MiB


def test_a_failure_before_anything_was_reserved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = Program(100 * MiB, outside=90 * MiB)
    program.alloc(50 * MiB)
    program.history.alloc(4096, "other")  # a tensor on the host
    run = program.write(tmp_path / "run")
    status = main(["explain", str(run), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert status == 0
    assert document["verdict"] == "exhausted"


def segmentless() -> History:
    history = History()
    history.alloc(4096, "Act", CUDA)
    return history


@pytest.mark.parametrize(
    ("history", "problem"),
    [
        (prefill(), "it ran on the CPU, which has no caching allocator"),
        (segmentless(), "the segments of cuda:0's allocator weren't recorded"),
        (History(), "no tensor was seen in it"),
    ],
)
def test_what_can_t_be_explained_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], history: History, problem: str
) -> None:
    run = history.write(tmp_path / "run")
    assert main(["explain", str(run)]) == 1
    assert problem in capsys.readouterr().err


def test_an_inconsistent_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = wasted()
    program.history.event(Action.FREE, 12345, 512, "Act", device=CUDA)
    assert main(["explain", str(program.write(tmp_path / "run"))]) == 1
    assert "can't be explained, since it is inconsistent: storage 12345" in capsys.readouterr().err


def test_a_failure_without_segments_is_explained_by_its_numbers(tmp_path: Path) -> None:
    history = segmentless()
    history.event(Action.OOM, MiB, 100 * MiB, None, device=CUDA)
    run = history.write(tmp_path / "run")
    found = explain(open_trace(run))
    assert found.oom is not None and found.oom.kind is Kind.EXHAUSTED
    assert found.trials is None


@pytest.mark.parametrize("argument", ["nothing-there", "--top=-1"])
def test_wrong_usage_is_one_sentence(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", argument, *(["run"] if argument.startswith("-") else [])]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("memtrace: ")
