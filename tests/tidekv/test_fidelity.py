"""Metrics of known values, and schedules that must or must not drift."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidekv.fidelity import Comparison, compare, final_states, js_divergence
from tidekv.models import FAMILIES
from tidekv.schedules import Chunked, LayerMajor, WholePrompt


def naive_js(p: torch.Tensor, q: torch.Tensor) -> float:
    p, q = p.softmax(-1), q.softmax(-1)
    middle = (p + q) / 2
    return float(((p * (p / middle).log()).sum() + (q * (q / middle).log()).sum()) / 2)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([1e-3, 1.0, 8.0]))
def test_js_divergence_is_its_definition_symmetric_and_at_most_ln_2(seed, scale):
    made = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(4, 50, generator=made, dtype=torch.float64) * scale for _ in range(2))
    found = js_divergence(p.clone(), q.clone())
    expected = torch.tensor([naive_js(*rows) for rows in zip(p, q, strict=True)])
    torch.testing.assert_close(found, expected.double(), rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(found, js_divergence(q.clone(), p.clone()))
    assert (found <= math.log(2)).all()
    assert (js_divergence(p.clone(), p.clone()) == 0).all()


def test_distributions_without_a_common_token_are_ln_2_apart():
    apart = torch.tensor([[0.0, -1e4]])
    assert js_divergence(apart.clone(), apart.flip(-1)).item() == pytest.approx(math.log(2))


def test_metrics_of_known_values():
    comparison = Comparison()
    reference = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    hidden = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
    comparison.add(hidden, reference, logits.clone(), torch.tensor([[2.0, 0.0], [2.0, 0.0]]))
    result = comparison.result("a", "b", None)
    assert result.relative_l2 == pytest.approx(math.sqrt(2 / 26))
    assert result.cosine == pytest.approx(0.5)
    assert result.top1_agreement == 0.5
    assert result.js_divergence == pytest.approx(
        naive_js(torch.tensor([0.0, 2.0]), torch.tensor([2.0, 0.0])) / 2
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_final_states_are_those_of_the_stock_forward(tiny, prompt, family):
    model, ids = tiny(family), prompt(60, batch=2)
    with torch.no_grad():
        expected = model.base_model(ids).last_hidden_state
    norm = getattr(model.base_model, "norm", None) or model.base_model.final_layer_norm
    for schedule in (WholePrompt(), Chunked(chunk_size=13), LayerMajor(chunk_size=13)):
        with torch.no_grad():
            actual = norm(final_states(model, ids, schedule, evict=False))
        assert ((actual - expected).norm() / expected.norm()).item() <= 1e-5


def test_late_eviction_changes_nothing_and_immediate_eviction_does(tiny, prompt):
    model, ids = tiny(), prompt(200)
    found = {one.method: one for one in compare(model, ids, budget=48, chunk_size=40)}
    assert found["Full-OneShot"].relative_l2 == 0
    for method in ("Full-Chunked", "Tide-NoEvict", "TideKV"):
        assert found[method].relative_l2 <= 1e-5
        assert found[method].cosine >= 1 - 1e-6
        assert found[method].js_divergence <= 1e-8
    same = dataclasses.replace(found["Tide-NoEvict"], method="TideKV", selector="snapkv")
    assert found["TideKV"] == same
    for method in ("Block-SnapKV", "Block-recent"):
        assert found[method].relative_l2 > 0.01
        assert found[method].js_divergence > 1e-5
