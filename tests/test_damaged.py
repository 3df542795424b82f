"""Whatever is wrong with a run, whoever reads it says so in one sentence."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memtrace.cli import main
from memtrace.trace import MANIFEST, SCHEMA
from memtrace.trace.manifest import file_checksums, read_manifest, write_manifest
from memtrace.trace.schema import TABLES as SCHEMAS
from memtrace.trace.schema import Action
from tests.synthetic import PID, History, prefill

TABLES = ("events", "contexts", "scopes", "samples", "requests")
FILES = (MANIFEST, f"{PID}/{MANIFEST}", *(f"{PID}/{table}.arrow" for table in TABLES))

Damage = Callable[[Path], object]


def truncated(share: float) -> Damage:
    def damage(path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data[: int(share * len(data))])

    return damage


def flipped(share: float) -> Damage:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[min(int(share * len(data)), len(data) - 1)] ^= 0x10
        path.write_bytes(data)

    return damage


def replaced(data: bytes) -> Damage:
    return lambda path: path.write_bytes(data)


def became(make: Damage) -> Damage:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


#: What can happen to any file of a complete run.
FILE_DAMAGE: dict[str, Damage] = {
    "emptied": truncated(0),
    "cut to a byte": truncated(0.002),
    "cut in half": truncated(0.5),
    "three bytes short": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "first bit flipped": flipped(0),
    "a bit flipped in the middle": flipped(0.5),
    "last bit flipped": flipped(1),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "removed": lambda path: path.unlink(),
    "foreign": replaced(b"PK\x03\x04 not one of ours"),
    "a folder": became(lambda path: path.mkdir()),
    "a symlink to itself": became(lambda path: path.symlink_to(path)),
    "a pipe": became(lambda path: os.mkfifo(path)),
    "endless": became(lambda path: path.symlink_to("/dev/zero")),
}


def rewritten(inner: str = "", **changes: Any) -> Damage:
    """A manifest with other values and a valid checksum."""

    def damage(run: Path) -> None:
        folder = run / inner
        write_manifest(folder, read_manifest(folder) | changes)
        if inner:
            root = read_manifest(run)
            write_manifest(run, root | {"files": file_checksums(run)})

    return damage


def manifest_text(text: str | bytes) -> Damage:
    data = text if isinstance(text, bytes) else text.encode()
    return lambda run: (run / MANIFEST).write_bytes(data)


def instead(make: Damage) -> Damage:
    """Something else in the run's place."""

    def damage(run: Path) -> None:
        shutil.rmtree(run)
        make(run)

    return damage


#: What a run's manifest, or the run as a whole, can be.
RUN_DAMAGE: dict[str, Damage] = {
    "nested JSON": manifest_text("[" * 200_000),
    "nested objects": manifest_text('{"a":' * 100_000),
    "nested below the parser's limit": manifest_text(
        '{"format": "memtrace", "x": ' + "[" * 900 + "]" * 900 + "}"
    ),
    "a JSON list": manifest_text("[]"),
    "a JSON null": manifest_text("null"),
    "a huge number": manifest_text('{"format": "memtrace", "schema": ' + "9" * 10_000 + "}"),
    "not UTF-8": manifest_text(b'{"format": "\xff"}'),
    "of another format": manifest_text('{"format": "perfetto", "schema": 1}'),
    "without a checksum": manifest_text(f'{{"format": "memtrace", "schema": {SCHEMA}}}'),
    "older": rewritten(schema=SCHEMA - 1),
    "newer": rewritten(schema=SCHEMA + 1),
    "much newer": rewritten(schema=10**30),
    "command is a string": rewritten(command="python infer.py"),
    "command holds numbers": rewritten(command=[1, 2]),
    "exit is a number": rewritten(exit=0),
    "exit code is a string": rewritten(exit={"code": "0"}),
    "knowledge is unknown": rewritten(knowledge="guessed"),
    "knowledge is a list": rewritten(knowledge=[]),
    "state is a number": rewritten(state=3),
    "process_peak is a list": rewritten(process_peak=[1]),
    "death is a list": rewritten(death=["SIGKILL"]),
    "death without a verdict": rewritten(death={"signal": 9, "name": "SIGKILL", "evidence": []}),
    "unrecorded without a pid": rewritten(unrecorded=[{"argv": [], "start_ticks": 1}]),
    "a GPU without a UUID": rewritten(sampling={"nvml": "", "gpus": [{"status": ""}]}),
    "a CUDA device without a number": rewritten(str(PID), cuda={"devices": [{"uuid": "x"}]}),
    "rank is a string": rewritten(str(PID), rank="1"),
    "process_peak holds strings": rewritten(process_peak={"1": "2"}),
    "files is a list": rewritten(files=[]),
    "files holds numbers": rewritten(files={"x": 1}),
    "files without sizes": rewritten(files={f"{PID}/events.arrow": {}}),
    "files with true as size": rewritten(files={"x": {"bytes": True, "crc32": 1}}),
    "no pid": rewritten(str(PID), pid=None),
    "pid is a string": rewritten(str(PID), pid="x"),
    "pid is true": rewritten(str(PID), pid=True),
    "argv is a mapping": rewritten(str(PID), argv={}),
    "dropped is a string": rewritten(str(PID), dropped="0"),
    "unseen is a string": rewritten(str(PID), unseen="all"),
    "torch is a number": rewritten(str(PID), torch=2.14),
    "reason is a list": rewritten(str(PID), reason=["x"]),
    "without the process": lambda run: shutil.rmtree(run / str(PID)),
    "an empty folder": instead(lambda run: run.mkdir()),
    "not there": lambda run: shutil.rmtree(run),
    "a file": instead(lambda run: run.write_text("x")),
    "a symlink to itself": instead(lambda run: run.symlink_to(run)),
}


def history_with(break_rows: Callable[[History], None]) -> History:
    history = prefill()
    break_rows(history)
    return history


def set_row(table: str, row: int, column: str, value: Any) -> Callable[[History], None]:
    def damage(history: History) -> None:
        values = list(history.rows[table][row])
        values[SCHEMAS[table].names.index(column)] = value
        history.rows[table][row] = tuple(values)

    return damage


#: Tables with valid checksums that say what can't be.
ROW_DAMAGE: dict[str, Callable[[History], None]] = {
    "an event names a missing context": set_row("events", 3, "context", 9999),
    "an event names a negative context": set_row("events", 3, "context", -1),
    "an event has no time": set_row("events", 3, "time_us", None),
    "an event has no id": set_row("events", 3, "id", None),
    "an event has no bytes": set_row("events", 3, "bytes", None),
    "an unknown action": set_row("contexts", 0, "action", 77),
    "a context without an action": set_row("contexts", 0, "action", None),
    "an allocation without a device": set_row("contexts", 0, "device", None),
    "an unknown component": set_row("contexts", 0, "component", "KV"),
    "an allocation without a component": set_row("contexts", 0, "component", None),
    "a component of the process": set_row("contexts", 0, "component", "allocator"),
    "a missing scope": set_row("contexts", 0, "scope", 9999),
    "a missing stack": set_row("contexts", 0, "stack", 0),
    "a scope that is its own parent": set_row("scopes", 2, "parent", 2),
    "a scope whose parent comes later": set_row("scopes", 2, "parent", 3),
    "a second root": set_row("scopes", 2, "parent", -1),
    "a scope without a name": set_row("scopes", 2, "name", None),
    "a scope without a parent": set_row("scopes", 2, "parent", None),
    "a layer without a number": lambda history: history.rows["scopes"].append((0, "layer", "x")),
    "a retag without what was": lambda history: history.event(Action.RETAG, 1, 1 << 20, "Act"),
}


def fails(run: Path, capsys: pytest.CaptureFixture[str], good: Path) -> None:
    """Every reader refuses ``run`` in one sentence."""
    for argv in (
        ["report", run],
        ["report", "--json", run],
        ["explain", run],
        ["explain", "--json", run],
        ["compare", good, run],
        ["view", run],
    ):
        code = main([str(word) for word in argv])
        out, err = capsys.readouterr()
        assert code == 1, argv
        assert re.fullmatch(r"memtrace: [^\n]+\n", err), err
        assert not re.search("Traceback|Error|Exception|errno", err)
        if "--json" in argv:
            assert json.loads(out) == {"schema": 1, "error": err[len("memtrace: ") : -1]}
        else:
            assert out == ""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def started(_program: str, words: list[str]) -> None:
        from app.load import prepare

        prepare(words[words.index("--") + 1 :])  # as the server does before it answers
        raise AssertionError(f"the viewer started on a damaged run: {words}")

    monkeypatch.setattr(os, "execv", started)
    return prefill().write(tmp_path / "run.memtrace")


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return prefill().write(tmp_path / "good.memtrace")


@pytest.mark.parametrize("damage", FILE_DAMAGE)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file(
    file: str, damage: str, run: Path, good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FILE_DAMAGE[damage](run / file)
    fails(run, capsys, good)


@pytest.mark.parametrize("damage", RUN_DAMAGE)
def test_a_damaged_run(
    damage: str, run: Path, good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RUN_DAMAGE[damage](run)
    fails(run, capsys, good)


@pytest.mark.parametrize("damage", ROW_DAMAGE)
@pytest.mark.parametrize("complete", [True, False], ids=["complete", "killed"])
def test_a_table_that_says_what_cannot_be(
    damage: str,
    complete: bool,
    run: Path,
    good: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    history = history_with(ROW_DAMAGE[damage])
    fails(history.write(tmp_path / "rows", complete=complete), capsys, good)


def test_a_table_of_another_kind(
    run: Path, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = prefill().write(tmp_path / "killed", complete=False)
    shutil.copy(killed / str(PID) / "scopes.arrow", killed / str(PID) / "events.arrow")
    fails(killed, capsys, good)


@pytest.mark.parametrize("name", ["", "x" * 5000, "..", "/", "/dev/null"])
def test_a_name_that_is_no_run(
    name: str, run: Path, good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fails(Path(name), capsys, good)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("file", [".", *FILES])
def test_an_unreadable_file(
    file: str, run: Path, good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / file).chmod(0)
    fails(run, capsys, good)
    (run / file).chmod(0o700)


@pytest.mark.parametrize("command", [["report"], ["explain"], ["compare", "{good}"], ["view"]])
def test_the_real_command_says_it_in_one_sentence(
    command: list[str], run: Path, good: Path
) -> None:
    (run / f"{PID}/events.arrow").write_bytes(b"")
    words = [word.format(good=good) for word in command]
    done = subprocess.run(
        [sys.executable, "-m", "memtrace", *words, str(run)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(
        r"memtrace: \S+events.arrow is truncated: 0 of \d+ bytes are there\n", done.stderr
    )
