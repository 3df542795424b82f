"""memtrace import and memtrace export as users run them: real processes."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.interchange.runs import assert_consistent
from tests.interchange.snapshots import BASE, DATA, MIB, block, dump, entry, free, segment, snapshot

RICH = DATA / "rich_oom_torch2.15.0.pickle"
MEMTRACE = [sys.executable, "-m", "memtrace"]


def memtrace(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [*MEMTRACE, *map(str, words)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def test_there_and_back(tmp_path: Path) -> None:
    done = memtrace(tmp_path, "import", RICH)
    assert done.returncode == 0 and done.stderr == ""
    run = tmp_path / "rich_oom_torch2.15.0.memtrace"
    assert f"{run.name}: 72 events from 83 entries of cuda:0, cpu:pinned" in done.stdout
    assert "not known: the process" in done.stdout
    assert_consistent(run)

    done = memtrace(tmp_path, "export", run.name, "--to", "torch-snapshot")
    assert done.returncode == 0 and done.stderr == ""
    assert "rich_oom_torch2.15.0.pickle: 83 entries of cpu:pinned, cuda:0" in done.stdout

    done = memtrace(tmp_path, "import", "rich_oom_torch2.15.0.pickle", "-o", "again", "--json")
    document = json.loads(done.stdout)
    assert document["run"] == str(tmp_path / "again")
    assert (document["entries"], document["events"], document["impossible"]) == (83, 72, 0)

    done = memtrace(tmp_path, "export", "again", "--to", "torch-snapshot", "--json")
    document = json.loads(done.stdout)
    assert document["file"] == str(tmp_path / "again.pickle")
    assert document["left_out"] == []

    report = json.loads(memtrace(tmp_path, "report", "again", "--json").stdout)
    assert report["torch"] == "unknown" and report["identities"]["hold"]


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


REFUSED: dict[str, bytes] = {
    "code": pickle.dumps({"segments": Evil()}),
    "truncated": RICH.read_bytes()[:5000],
    "text": b"hello",
    "another pickle": pickle.dumps({"weights": [1, 2, 3]}),
    "a wrong type": pickle.dumps({"segments": [{"address": "here"}]}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_snapshot_ends_in_a_sentence(tmp_path: Path, name: str) -> None:
    file = tmp_path / "hostile.pickle"
    file.write_bytes(REFUSED[name])
    done = memtrace(tmp_path, "import", "hostile.pickle")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("memtrace: hostile.pickle ")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == [file]


def test_ctrl_c_leaves_nothing_half_made(tmp_path: Path) -> None:
    entries = [entry("segment_alloc", BASE, 2 * MIB)]
    for _ in range(100_000):
        entries += [entry("alloc", BASE, 512), *free(BASE, 512)]
    file = dump(snapshot([segment(BASE, block(2 * MIB, "inactive"))], entries), tmp_path)
    process = subprocess.Popen(
        [*MEMTRACE, "import", file.name, "-o", "run"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    while not (tmp_path / ".run.part").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert (out, err) == ("", "")
    assert list(tmp_path.iterdir()) == [file]
