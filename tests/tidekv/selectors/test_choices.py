"""What choices remember within one prefill: Ada-KV's budgets, chunks, sums, draws."""

import pytest
import torch

from tests.tidekv.selectors.cases import as_lists, random_layer
from tests.tidekv.selectors.naive import NAIVE
from tidekv.selectors import H2O, AdaKV, ChunkKV, LayerEnd, Random, Request, SnapKV


def test_adakv_without_an_even_share_is_one_contest():
    """One head attends to one row, the other to none in particular: it gets the rest."""
    keys = torch.zeros(1, 2, 42, 4, dtype=torch.float64)
    keys[0, 0, 17] = 30.0
    layer = LayerEnd(0, torch.ones(1, 2, 2, 4, dtype=torch.float64), keys, keys, 1.0)
    parameters = {"window": 2, "sinks": 0, "kernel_size": 1}
    contest = AdaKV(safeguard=0.0, **parameters).begin(Request(1, 42, 12)).select(layer)
    assert contest.counts is not None and contest.counts.tolist() == [[3, 21]]
    safe = AdaKV(safeguard=0.2, **parameters).begin(Request(1, 42, 12)).select(layer)
    assert safe.counts is not None and safe.counts.tolist() == [[5, 19]]
    even = AdaKV(safeguard=1.0, **parameters).begin(Request(1, 42, 12)).select(layer)
    uniform = SnapKV(**parameters).select(layer, 12, "blockwise")
    assert as_lists(even, 2) == uniform.tolist()


@pytest.mark.parametrize("reuse", [1, 2, 3])
def test_chunkkv_reuses_rows(reuse):
    choice = ChunkKV(window=4, reuse=reuse).begin(Request(6, 90, 40))
    ends = [random_layer(90, 4, seed=i, index=i) for i in range(6)]
    kept = [choice.select(end).indices for end in ends]
    for index, rows in enumerate(kept):
        scored = ends[index - index % reuse]
        assert torch.equal(rows, ChunkKV(window=4).select(scored, 40, "blockwise"))
    assert not torch.equal(kept[0], kept[3])


@pytest.mark.parametrize("scoring", ["blockwise", "dense"])
@pytest.mark.parametrize("chunk", [1, 7, 50, 90])
def test_h2o_sees_the_prompt_in_chunks(scoring, chunk):
    selector = H2O(block_size=16)
    layers = [random_layer(90, 90, seed=i, index=i, batch=2) for i in range(2)]
    choice = selector.begin(Request(2, 90, 31, scoring))
    for start in range(0, 90, chunk):
        for layer in layers:
            stop = min(start + chunk, 90)
            choice.observe(
                layer.index,
                layer.queries[:, :, start:stop],
                layer.keys[:, :, :stop],
                scaling=layer.scaling,
            )
    for layer in layers:
        assert choice.select(layer).indices.tolist() == NAIVE[H2O](selector, layer, 31)


def test_h2o_keeps_the_share_of_recent_rows_that_was_asked_for():
    """0.29 of 100 is 29, although the product in binary lies just below it."""
    nothing = torch.zeros(1, 1, 200, 4)  # to attend to: early rows have the largest sums
    kept = H2O(recent_share=0.29).select(LayerEnd(0, nothing, nothing, nothing, 1.0), 100, "dense")
    assert kept.tolist() == [[[*range(71), *range(171, 200)]]]


def test_random_is_a_seeds():
    layer = random_layer(200, 0, seed=1, batch=2)
    first = Random(seed=3).select(layer, 50, "blockwise")
    assert torch.equal(first, Random(seed=3).select(layer, 50, "dense"))
    half = LayerEnd(0, layer.queries, layer.keys.half(), layer.values, 1.0)
    assert torch.equal(first, Random(seed=3).select(half, 50, "blockwise"))
    others = [
        Random(seed=4).select(layer, 50, "blockwise"),
        Random(seed=3).select(random_layer(200, 0, seed=1, batch=2, index=1), 50, "blockwise"),
    ]
    for other in (*others, first.flip(0), first.flip(1)):
        assert not torch.equal(first, other)


def test_random_rows_are_spread_evenly_and_drawn_anew():
    """4,000 rows of 200 places, 20 per place: none below 5 or above 45 (5 standard deviations)."""
    layer = random_layer(200, 0, seed=1, batch=1, kv_heads=1)
    choice = Random().begin(Request(1, 200, 40))
    drawn = torch.cat([choice.select(layer).indices.flatten() for _ in range(100)])
    places = drawn.bincount(minlength=200)
    assert places.min() >= 5 and places.max() <= 45
