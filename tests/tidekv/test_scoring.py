"""Weights and pooling in blocks are those made at once; the best are the best."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tidekv.live_bytes import LiveBytes
from tests.tidekv.selectors.cases import random_layer
from tests.tidekv.selectors.naive import attention
from tidekv.errors import InfeasibleError
from tidekv.scoring import Attention, Rule, best, keep_best, key_scores, pooled


@settings(max_examples=60)
@given(
    window=st.integers(1, 9),
    prefix=st.integers(0, 40),
    block_size=st.sampled_from([1, 2, 5, 16, 200]),
    own=st.booleans(),
    softcap=st.sampled_from([None, 0.7]),
)
@pytest.mark.parametrize("scoring", ["blockwise", "dense"])
def test_weights_are_the_softmax(scoring, window, prefix, block_size, own, softcap):
    layer = random_layer(prefix + window, window, seed=prefix, batch=2, softcap=softcap)
    heads = Attention(layer.queries, layer.keys, layer.scaling, softcap)
    none = torch.empty(2, 2, 2, window, 0, dtype=torch.float64)
    weights = torch.cat((none, *heads.weights(scoring, block_size, own=own)), dim=-1).flatten(1, 2)
    assert weights.shape == (2, 4, window, prefix + (window if own else 0))
    for batch in range(2):
        for head in range(4):
            for number, row in enumerate(attention(layer, batch, head)):
                expected = torch.zeros(prefix + window, dtype=torch.float64)
                expected[: len(row)] = row
                got = weights[batch, head, number]
                torch.testing.assert_close(got, expected[: len(got)], rtol=1e-12, atol=1e-15)


@settings(max_examples=200)
@given(
    blocks=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    kernel=st.sampled_from([1, 3, 5, 7, 15]),
    pooling=st.sampled_from(["max", "avg"]),
)
def test_pooling_crosses_the_borders_of_blocks(blocks, kernel, pooling):
    """Whole numbers, whose averages don't depend on the order."""
    values = torch.randint(0, 99, (2, 2, 3, sum(blocks))).double()
    rule = Rule("mean", pooling, kernel)
    parts = list(pooled(iter(values.split(blocks, dim=-1)), rule))
    assert torch.equal(torch.cat(parts, dim=-1), rule.pool(values))


@settings(max_examples=100)
@given(
    levels=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    repeats=st.sampled_from([1, 100]),
    data=st.data(),
)
def test_lower_position_wins_a_tie(levels, repeats, data):
    """Also where scores are merged in several parts."""
    levels = levels * repeats
    sinks = data.draw(st.integers(0, len(levels)))
    count = data.draw(st.integers(0, min(len(levels) - sinks, 50)))
    scores = torch.tensor(levels, dtype=torch.float32).expand(2, 3, -1)
    expected = sorted(range(sinks, len(levels)), key=lambda i: (-levels[i], i))[:count]
    assert best(scores, first=sinks, count=count).tolist() == [[expected] * 3] * 2
    kept = keep_best(scores, rows=sinks + count + 2, length=len(levels) + 2, sinks=sinks)
    rows = [*range(sinks), *sorted(expected), len(levels), len(levels) + 1]
    assert kept.tolist() == [[rows] * 3] * 2


def test_scores_are_fp32_for_bfloat16_input():
    """What bfloat16 scores would tie, fp32 scores tell apart."""
    torch.manual_seed(0)
    queries, keys = torch.randn(1, 4, 8, 16).bfloat16(), torch.randn(1, 2, 300, 16).bfloat16()
    for scoring in ("blockwise", "dense"):
        half, same_values = (
            key_scores(
                Attention(queries.to(dtype), keys.to(dtype), 0.25),
                Rule(),
                scoring=scoring,
                block_size=64,
            )
            for dtype in (torch.bfloat16, torch.float32)
        )
        assert half.dtype == torch.float32
        assert torch.equal(half, same_values)


def scorer_peak(length: int, scoring: str, rule: Rule) -> int:
    """Bytes that scoring an 8B model's layer makes at most."""
    queries, keys = torch.randn(1, 32, 32, 128), torch.randn(1, 8, length, 128)
    with torch.no_grad(), LiveBytes(queries, keys) as live:
        attention = Attention(queries, keys, 128**-0.5)
        key_scores(attention, rule, scoring=scoring, block_size=2048)
    return live.peak


@pytest.mark.parametrize("aggregate_first", [True, False])
def test_blockwise_memory_is_within_its_bound(aggregate_first):
    """O(B·Hq·W·b_s): a block's keys and logits, and its sum over the window; and the scores."""
    rule = Rule("mean", "max", 7, aggregate_first)
    keys_and_logits = 4 * 8 * 128 * 2048 + 4 * 32 * 32 * 2048
    sums_and_scores = 2 * 4 * 32 * 2048 + 4 * 8 * 8192
    assert scorer_peak(8192, "blockwise", rule) <= keys_and_logits + sums_and_scores
    assert scorer_peak(8192, "dense", rule) > 4 * 32 * 32 * 8192


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"kernel_size": 0}, "odd and positive"),
        ({"pooling": "sum"}, "There is no pooling 'sum'; use one of max, avg."),
        ({"aggregate": "min"}, "There is no aggregate 'min'; use one of mean, max."),
    ],
)
def test_rules_that_cant_be(parameters, message):
    with pytest.raises(InfeasibleError, match=message):
        Rule(**parameters)
