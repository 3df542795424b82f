"""What building a compact cache of Llama-3.1-8B takes on an A100, in PyTorch's own allocator."""

import json
import sys
from collections.abc import Callable

import pytest

from tests.virtual_gpu.running import REAL, ROOT, run_on
from tests.virtual_gpu.vectors import TORCH

MIB, GIB = 2**20, 2**30

sys.path.insert(0, str(ROOT / "benchmarks"))
import construction_peak as benchmark  # noqa: E402

WORK = """
import sys
sys.path.insert(0, "benchmarks")
import construction_peak
construction_peak.work([int(number) for number in sys.argv[2:]], [int(sys.argv[1])], "cuda")
"""


@pytest.fixture(scope="module")
def peaks() -> Callable[..., dict[str, int]]:
    """``peaks(tokens, *titles)``: allocated peaks of these rows of the benchmark."""
    if REAL:
        pytest.skip("benchmarks/construction_peak.py measures on a real GPU")
    titles = {row.title.strip(): number for number, row in enumerate(benchmark.ROWS)}

    def measure(tokens: int, *wanted: str) -> dict[str, int]:
        done = run_on("a100-40g", WORK, tokens, *(titles[title] for title in wanted))
        assert done.returncode == 0, done.stderr
        found = [json.loads(line)["peak"] for line in done.stdout.splitlines()]
        return dict(zip(wanted, found, strict=True))

    return measure


TIGHT = "TideKV, C = 512, pieces of 256"


def test_snapkv_takes_what_the_paper_says_and_tidekv_less(peaks):
    snapkv, wide, tight = peaks(65536, "SnapKV, whole prompt", "TideKV, C = 2048", TIGHT).values()
    # From torch 2.15 on no workspace of cuBLAS stays beside the peak.
    workspace = 8_519_680 if TORCH >= (2, 15) else 0
    assert (snapkv + workspace) / GIB == pytest.approx(22.748, abs=0.001)
    assert wide <= 16.30 * GIB
    assert tight <= 16.23 * GIB


@pytest.mark.slow
def test_parked_caches_are_not_on_the_card(peaks):
    tight, parked = peaks(8192, TIGHT, "finished caches parked").values()
    assert tight - parked >= 30 * 16 * MIB


@pytest.mark.slow
def test_a_bridge_on_the_host_is_not_on_the_card(peaks):
    """A token more costs its keys and values in one layer, its scores and its id."""
    short, long = (peaks(n, "hidden bridge on the host").popitem()[1] for n in (8192, 16384))
    assert long - short <= 8192 * (2 * 8 * 128 * 2 + 8 * 4 + 8)


def test_streamed_weights_need_two_layers(peaks):
    (peak,) = peaks(65536, "weights streamed").values()
    assert peak <= 3 * GIB
