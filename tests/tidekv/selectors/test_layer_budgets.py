"""Budgets of layers: exact sums, PyramidKV's slope, CAKE's cascade."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tidekv.selectors.cases import PARAMETERS, random_layer
from tests.tidekv.selectors.naive import cake_measure, ranked
from tidekv.budgets import proportional, pyramid
from tidekv.selectors import CAKE, PyramidKV, Request

weights = st.one_of(
    st.floats(1e-6, 1e6), st.sampled_from([0.0, 1.0, 1.0, math.nan, math.inf, -1.0, 5e-324])
)


def dhondt(claims: list[float], total: int, most: int) -> list[int]:
    """Row by row to the best claim, the first where equal."""
    exact = [Fraction(w) if 0 < w < math.inf else Fraction(5e-324) for w in claims]
    shares = [0] * len(claims)
    for _ in range(total):
        open_ = [i for i in range(len(claims)) if shares[i] < most]
        shares[max(open_, key=lambda i: (exact[i] / (shares[i] + 1), -i))] += 1
    return shares


@settings(max_examples=150)
@given(claims=st.lists(weights, min_size=1, max_size=7), most=st.integers(0, 20), data=st.data())
def test_proportional_is_dhondts_method(claims, most, data):
    total = data.draw(st.integers(0, most * len(claims)))
    assert proportional(claims, total, most) == dhondt(claims, total, most)


@settings(max_examples=150)
@given(claims=st.lists(weights, min_size=2, max_size=20), most=st.integers(1, 4096))
def test_one_more_to_share_takes_from_none_to_give_to_another(claims, most):
    total = most * len(claims) // 3
    before = None
    for ended in range(1, len(claims) + 1):
        shares = proportional(claims[:ended], min(total, ended * most), most)
        assert sum(shares) == min(total, ended * most)
        assert all(0 <= share <= most for share in shares)
        if before is not None:
            assert all(new <= old for new, old in zip(shares, before, strict=False))
        before = shares


@settings(max_examples=200)
@given(
    layers=st.integers(1, 80),
    mean=st.integers(0, 5000),
    more=st.integers(0, 20000),
    beta=st.sampled_from([1, 1.5, 2, 20, 1000]),
)
def test_pyramid_sums_to_the_budget(layers, mean, more, beta):
    rows = pyramid(layers, mean=mean, most=mean + more, beta=beta)
    assert sum(rows) == layers * mean and len(rows) == layers
    assert rows == sorted(rows, reverse=True)
    assert all(0 <= r <= mean + more for r in rows)
    steps = [a - b for a, b in itertools.pairwise(rows)]
    assert not steps or max(steps) - min(steps) <= 2  # linear, up to rounding
    if layers > 1 and 2 * mean - mean // beta <= mean + more:
        assert (rows[0], rows[-1]) == (2 * mean - mean // beta, mean // beta)


def test_pyramid_of_a_long_prompt():
    """The first and last layer of Llama 3.1 at 64K that the authors' code would have (less W)."""
    rows = pyramid(32, mean=4096 - 64, most=65536 - 64, beta=20)
    assert (rows[0] + 64, rows[-1] + 64) == (7927, 265)
    assert sum(rows) == 32 * (4096 - 64)


def test_pyramidkv_spreads_the_models_budget():
    selector = PyramidKV(window=4, sinks=2, beta=4)
    choice = selector.begin(Request(6, 100, 30))
    kept = [choice.select(random_layer(100, 4, seed=i, index=i)).indices for i in range(6)]
    sizes = [rows.shape[2] for rows in kept]
    assert sizes == [48, 41, 34, 26, 19, 12] and sum(sizes) == 6 * 30
    # A prompt that is cut while it is read may have fewer rows than the layer's budget.
    again = selector.begin(Request(6, 100, 30))
    assert again.select(random_layer(40, 4, seed=1)).indices.shape[2] == 40


@settings(max_examples=40)
@given(selector=PARAMETERS[CAKE], data=st.data())
@pytest.mark.parametrize("scoring", ["blockwise", "dense"])
def test_cake_cascade_ends_as_one_cut_would(scoring, selector, data):
    """Sizes at every layer's end, and finally the rows that the final budgets alone would keep."""
    layers = data.draw(st.integers(1, 4))
    length = selector.window + data.draw(st.integers(1, 15))
    rows = data.draw(st.integers(selector.window, length))
    ends = [
        random_layer(length, selector.window, seed=10 * length + i, index=i) for i in range(layers)
    ]
    choice = selector.begin(Request(layers, length, rows, scoring))
    most, total = length - selector.window, layers * (rows - selector.window)
    kept: list[torch.Tensor] = []
    for end in ends:
        kept.append(choice.select(end).indices)
        for index, inside in choice.shrink():
            assert index < end.index and inside.shape[2] < kept[index].shape[2]
            kept[index] = kept[index].gather(-1, inside)
        held = sum(one.shape[2] - selector.window for one in kept)
        assert held == min(total, len(kept) * most)
    assert sum(one.shape[2] for one in kept) == layers * rows
    measured = [cake_measure(selector, end) for end in ends]
    budgets = dhondt([preference for _, preference in measured], total, most)
    for (scores, _), budget, one in zip(measured, budgets, kept, strict=True):
        for head in range(2):
            first = sorted(ranked(scores[0][head], range(most))[:budget])
            assert one[0, head].tolist() == [*first, *range(most, length)]


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_cake_shares_equally_where_nothing_is_computed(value):
    choice = CAKE(window=4).begin(Request(3, 50, 20))
    sizes: list[int] = []
    for index in range(3):
        end = random_layer(50, 4, seed=1, index=index)
        end.keys.fill_(value), end.queries.fill_(value)
        sizes.append(choice.select(end).indices.shape[2])
        for layer, rows in choice.shrink():
            sizes[layer] = rows.shape[2]
        assert len(set(sizes)) == 1
    assert sizes == [20, 20, 20]
