"""Programs recorded on PyTorch's own allocator, replayed: every event and block as recorded."""

from pathlib import Path

import pytest

from memtrace.allocator.verify import verify_run
from memtrace.trace.reader import open_trace
from tests.virtual_gpu.running import REAL, run_on

pytestmark = pytest.mark.skipif(REAL, reason="the programs fill a card of a known size")

#: Settings, and the memory fraction that the program sets.
PROGRAMS = [
    ("", ""),
    ("expandable_segments:True", "0.1"),
    ("max_split_size_mb:64,garbage_collection_threshold:0.5", "0.1"),
    ("", "0.1"),
    ("expandable_segments:True", ""),
    ("garbage_collection_threshold:0.5", ""),
    ("garbage_collection_threshold:0.8", "0.1"),
    ("max_split_size_mb:64", ""),
    ("max_split_size_mb:20", "0.1"),
    ("roundup_power2_divisions:4", "0.1"),
    ("max_non_split_rounding_mb:30,max_split_size_mb:25", ""),
]


@pytest.mark.parametrize(
    ("seed", "conf", "fraction"),
    [
        pytest.param(seed, *one, marks=[pytest.mark.slow] if seed > 2 else [])
        for seed, one in enumerate(PROGRAMS * 2)
    ],
)
def test_random_programs_replay_event_by_event(
    cache: Path, tmp_path: Path, seed: int, conf: str, fraction: str
) -> None:
    run = tmp_path / "run"
    arguments = [seed, run, *filter(None, [fraction])]
    done = run_on("a100-40g", "random_program.py", *arguments, PYTORCH_CUDA_ALLOC_CONF=conf)
    assert done.returncode == 0, done.stderr
    (found,) = verify_run(open_trace(run))
    assert found.difference is None
    assert found.equal == found.events > 1000
    assert found.warm > 0
