"""``memtrace explain`` of programs that run out of memory on a virtual card, and of their logs."""

import json
import sys
from pathlib import Path

import pytest

from tests.virtual_gpu.running import SCRIPTS
from tests.virtual_gpu.test_programs import record, run
from tests.virtual_gpu.vectors import TORCH

VERDICTS = {
    "fragmented": "fragmented",
    "wasted": "fragmented",
    "pending": "pending",
    "exhausted": "exhausted",
    "fraction": "fraction-limited",
    "graph": "private pool",
}
#: What PyTorch's own message tells of each.
TOLD = VERDICTS | {"pending": "fragmented"}


@pytest.mark.parametrize(
    "way",
    [way if way == "pending" else pytest.param(way, marks=pytest.mark.slow) for way in VERDICTS],
)
def test_each_way_to_run_out_of_memory(cache: Path, tmp_path: Path, way: str) -> None:
    done = record(tmp_path, "l4-24g", SCRIPTS / "out_of_memory.py", way)
    assert done.returncode == 1
    found = json.loads(run("explain", "run", "--json", cwd=tmp_path).stdout)
    assert found["verdict"] == VERDICTS[way]
    # A free block that nobody took may have been in a private pool, where those have no names.
    assert found["sure"] == (way != "pending" or TORCH >= (2, 13))
    assert found["help"]
    (tmp_path / "log.txt").write_text(done.stderr)
    told = json.loads(run("explain", "log.txt", "--json", cwd=tmp_path).stdout)
    (message,) = told["messages"]
    assert message["verdict"] == TOLD[way]
    assert message["free"]["low"] <= found["oom"]["free"] <= message["free"]["high"]


def test_the_setting_that_explain_names_avoids_the_error(cache: Path, tmp_path: Path) -> None:
    script = SCRIPTS / "out_of_memory.py"
    record(tmp_path, "l4-24g", script, "wasted")
    found = json.loads(run("explain", "run", "--json", cwd=tmp_path).stdout)
    good = [one["settings"] for one in found["settings"]["others"] if one["avoids"]]
    assert "expandable_segments:True" in good
    assert good[0] in found["help"][0]
    done = run(
        *("record", "-o", "again", "--virtual-gpu", "l4-24g", "--", "env"),
        *(f"PYTORCH_CUDA_ALLOC_CONF={good[0]}", sys.executable, script, "wasted"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
