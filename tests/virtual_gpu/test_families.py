"""Attribution by rule on CUDA: almost nothing at the peak is left to ``other``."""

import json
from pathlib import Path

from tests.virtual_gpu.running import run_on


def test_other_is_below_two_percent_of_the_peak(cache: Path, tmp_path: Path) -> None:
    done = run_on("a100-40g", "families.py", tmp_path)
    assert done.returncode == 0, done.stderr
    for family, peak in json.loads(done.stdout.splitlines()[-1]).items():
        assert peak["problem"] is None, family
        assert peak["other"] < 0.02 * peak["allocated"], (family, peak)
        assert peak["model"] >= peak["weights"], (family, peak)
