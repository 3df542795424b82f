"""Programs recorded on PyTorch's own allocator, replayed: every event and block as recorded."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from memtrace.allocator.settings import Settings
from memtrace.allocator.simulation import simulate
from memtrace.allocator.verify import verify_run
from memtrace.analysis.accounts import accounts
from memtrace.analysis.recorded import replayable, setup_of
from memtrace.trace.reader import open_trace
from tests.virtual_gpu.running import REAL, run_on
from tests.virtual_gpu.test_programs import run
from tests.virtual_gpu.vectors import TORCH

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
    if seed % 2 and TORCH < (2, 13):
        pytest.skip("the program uses private pools, which this PyTorch's history doesn't name")
    run = tmp_path / "run"
    arguments = [seed, run, *filter(None, [fraction])]
    done = run_on("a100-40g", "random_program.py", *arguments, PYTORCH_CUDA_ALLOC_CONF=conf)
    assert done.returncode == 0, done.stderr
    (found,) = verify_run(open_trace(run))
    assert found.difference is None
    assert found.equal == found.events > 1000
    assert found.warm > 0


@pytest.mark.slow
def test_a_replay_foretells_what_pytorch_reserves(cache: Path, tmp_path: Path) -> None:
    """A run under the default settings, replayed under others, against runs under those."""
    confs = ("", "expandable_segments:True", "max_split_size_mb:64", "roundup_power2_divisions:4")
    reserved = {}
    for number, conf in enumerate(confs):
        prefill = (sys.executable, "-m", "tidekv", "run", "--model", "llama-3.1-8b")
        done = run(
            *("record", "-o", str(number), "--virtual-gpu", "a100-40g", "--", "env"),
            *(f"PYTORCH_CUDA_ALLOC_CONF={conf}", *prefill, "--device", "cuda", "--budget", "4096"),
            *("--prompt-tokens", "32768", "--schedule", "whole_prompt", "--max-new-tokens", "2"),
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        account = accounts(open_trace(tmp_path / str(number)).processes[-1])[0]
        assert account.reserved is not None
        reserved[conf] = account.reserved.peak
    assert len(set(reserved.values())) == len(confs)  # the settings matter
    trace = open_trace(tmp_path / "0")
    requests = replayable(trace)[-1]
    setup = setup_of(trace, requests.process, requests.device)
    for conf, peak in reserved.items():
        tried = replace(setup, settings=Settings.parse(conf, setup.torch))
        assert simulate(requests, tried).reserved_peak == peak
