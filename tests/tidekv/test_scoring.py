"""Both scorers select what the formula, written out, selects."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tidekv.live_bytes import LiveBytes
from tidekv.errors import InfeasibleError
from tidekv.selectors import LayerEnd, SnapKV


def layer_end(queries: torch.Tensor, keys: torch.Tensor, scaling: float) -> LayerEnd:
    return LayerEnd(0, queries, keys, keys, scaling)


def naive_selection(snap: SnapKV, layer: LayerEnd, rows: int) -> list[list[list[int]]]:
    """SnapKV from its formula, one number at a time; ties go to the lower position."""
    batch, heads, window, _ = layer.queries.shape
    kv_heads, length = layer.keys.shape[1:3]
    group = heads // kv_heads
    prefix = length - window
    kept = []
    for b in range(batch):
        kept.append([])
        for h in range(kv_heads):
            per_head = []
            for g in range(group):
                total = torch.zeros(prefix, dtype=layer.keys.dtype)
                for w in range(window):
                    seen = prefix + w + 1
                    query = layer.queries[b, h * group + g, w]
                    logits = layer.scaling * (layer.keys[b, h, :seen] * query).sum(-1)
                    weights = torch.exp(logits - logits.max())
                    total += (weights / weights.sum())[:prefix]
                per_head.append(total)
            stacked = torch.stack(per_head)
            raw = stacked.mean(0) if snap.aggregate == "mean" else stacked.max(0).values
            reach = snap.kernel_size // 2
            scores = []
            for i in range(prefix):
                near = raw[max(i - reach, 0) : i + reach + 1]
                scores.append(
                    near.max().item()
                    if snap.pooling == "max"
                    else near.sum().item() / snap.kernel_size
                )
            candidates = sorted(range(snap.sinks, prefix), key=lambda i: (-scores[i], i))
            count = rows - snap.sinks - window
            chosen = [*range(snap.sinks), *candidates[:count], *range(prefix, length)]
            kept[b].append(sorted(chosen))
    return kept


@st.composite
def problems(draw: st.DrawFn) -> tuple[SnapKV, LayerEnd, int]:
    snap = SnapKV(
        window=draw(st.integers(1, 9)),
        kernel_size=draw(st.sampled_from([1, 3, 5, 7])),
        pooling=draw(st.sampled_from(["max", "avg"])),
        sinks=draw(st.integers(0, 5)),
        aggregate=draw(st.sampled_from(["mean", "max"])),
        block_size=draw(st.sampled_from([1, 2, 5, 16, 200])),
    )
    mandatory = snap.window + snap.sinks
    length = draw(st.integers(mandatory, mandatory + 60))
    rows = draw(st.integers(mandatory, length))
    batch, kv_heads, group = (draw(st.integers(1, 2)) for _ in range(3))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (batch, kv_heads * group, snap.window, 8)
    queries = torch.randn(shape, generator=seed, dtype=torch.float64)
    keys = torch.randn(batch, kv_heads, length, 8, generator=seed, dtype=torch.float64)
    return snap, layer_end(queries, keys, 8**-0.5), rows


@settings(deadline=None, max_examples=400)
@given(problem=problems())
@pytest.mark.parametrize("scoring", ["blockwise", "dense"])
def test_selects_what_the_formula_selects(scoring, problem):
    """float64, so that rounding can't swap two scores; max pooling ties by itself."""
    snap, layer, rows = problem
    assert snap.select(layer, rows, scoring).tolist() == naive_selection(snap, layer, rows)


@settings(deadline=None, max_examples=60)
@given(
    block_size=st.sampled_from([1, 3, 8, 64]),
    levels=st.lists(st.integers(0, 2), min_size=20, max_size=60),
    count=st.integers(0, 12),
)
@pytest.mark.parametrize("scoring", ["blockwise", "dense"])
def test_lower_position_wins_a_tie(scoring, block_size, levels, count):
    """Many equal keys: scores take three values, exactly."""
    snap = SnapKV(window=1, kernel_size=1, sinks=0, block_size=block_size)
    keys = torch.tensor([*levels, 0], dtype=torch.float32).view(1, 1, -1, 1)
    layer = layer_end(torch.ones(1, 1, 1, 1), keys, 1.0)
    kept = snap.select(layer, count + 1, scoring)[0, 0, :-1].tolist()
    best = sorted(range(len(levels)), key=lambda i: (-levels[i], i))[:count]
    assert kept == sorted(best)


@settings(deadline=None, max_examples=80)
@given(problem=problems())
def test_kept_rows_are_the_budget_with_sinks_and_window(problem):
    snap, layer, rows = problem
    kept = snap.select(layer, rows, "blockwise")
    length = layer.keys.shape[2]
    assert kept.shape == (*layer.keys.shape[:2], rows)
    assert (kept.diff(dim=-1) > 0).all()
    assert (kept[..., : snap.sinks] == torch.arange(snap.sinks)).all()
    assert (kept[..., rows - snap.window :] == torch.arange(length - snap.window, length)).all()


def test_scores_are_fp32_for_bfloat16_input():
    """What bfloat16 scores would tie, fp32 scores tell apart."""
    torch.manual_seed(0)
    queries, keys = torch.randn(1, 4, 8, 16), torch.randn(1, 2, 300, 16)
    snap = SnapKV(window=8, kernel_size=1)
    half = layer_end(queries.bfloat16(), keys.bfloat16(), 0.25)
    same_values = layer_end(queries.bfloat16().float(), keys.bfloat16().float(), 0.25)
    for scoring in ("blockwise", "dense"):
        assert torch.equal(snap.select(half, 64, scoring), snap.select(same_values, 64, scoring))


def scorer_peak(length: int, scoring: str) -> int:
    """Bytes that selecting 1,024 rows of an 8B model's layer makes at most."""
    queries = torch.randn(1, 32, 32, 128)
    keys = torch.randn(1, 8, length, 128)
    with torch.no_grad(), LiveBytes(queries, keys) as live:
        SnapKV().select(layer_end(queries, keys, 128**-0.5), 1024, scoring)
    return live.peak


def test_blockwise_memory_grows_by_the_scores_alone():
    short, long = scorer_peak(6144, "blockwise"), scorer_peak(12288, "blockwise")
    assert long - short <= 4 * 8 * 6144


def test_blockwise_memory_is_within_its_bound():
    """O(B·Hq·W·b_s): a block's keys and logits, and its sum over the window; and the scores."""
    block = SnapKV().block_size
    keys_and_logits = 4 * 8 * 128 * block + 4 * 32 * 32 * block
    sums_and_scores = 2 * 4 * 32 * block + 4 * 8 * 8192
    assert scorer_peak(8192, "blockwise") <= keys_and_logits + sums_and_scores
    assert scorer_peak(8192, "dense") > 4 * 32 * 32 * 8192


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"window": 0}, "window ≥ 1"),
        ({"sinks": -1}, "sinks ≥ 0"),
        ({"block_size": 0}, "block_size ≥ 1"),
        ({"kernel_size": 4}, "odd and positive"),
        ({"pooling": "sum"}, "There is no pooling 'sum'; use one of max, avg."),
        ({"aggregate": "min"}, "There is no aggregate 'min'; use one of mean, max."),
    ],
)
def test_bad_parameters(parameters, message):
    with pytest.raises(InfeasibleError, match=message):
        SnapKV(**parameters)
