"""The compact cache: logical length for positions, physical length for masks."""

from typing import Any

import pytest
import torch

import tidekv
from tidekv import compat
from tidekv.cache import CompactCache, CompactLayer


def ask(model: Any, cache: CompactCache, question: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        output = model(question, use_cache=True, **{compat.cache_argument(model): cache})
    return output.logits


@pytest.fixture(params=["sdpa", "eager"])
def model(request, tiny):
    model = tiny("llama")
    model.set_attn_implementation(request.param)
    yield model
    model.set_attn_implementation("sdpa")


def test_lengths():
    layer = CompactLayer()
    layer.store(torch.zeros(1, 2, 10, 4), torch.zeros(1, 2, 10, 4), dropped=90)
    assert layer.get_seq_length() == 100
    assert layer.get_mask_sizes(5) == (15, 90)
    layer.update(torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4))
    assert layer.get_seq_length() == 105
    assert layer.get_mask_sizes(torch.arange(105, 106)) == (16, 90)  # transformers ≤ 5.2
    layer.reset()
    assert layer.get_seq_length() == 0


def test_question_at_once_equals_token_by_token(model, prompt):
    ids, question = prompt(80), prompt(9)
    at_once = ask(model, tidekv.prefill(model, ids, budget=40).cache, question)
    cache = tidekv.prefill(model, ids, budget=40).cache
    one_by_one = [ask(model, cache, question[:, i : i + 1]) for i in range(9)]
    torch.testing.assert_close(at_once, torch.cat(one_by_one, dim=1), rtol=1e-4, atol=1e-5)
    assert cache.get_seq_length() == 89
    assert cache.rows() == [49] * 3


def test_question_equals_full_cache_with_the_dropped_rows_masked(model, prompt):
    """The reference: the stock cache of every row, dropped ones hidden by a 4-D mask per layer."""
    ids, question = prompt(80), prompt(9)
    # One budget of all rows but one per head can't be expressed as one mask for all heads, so
    # every head drops the same rows: a selector of fixed positions.
    kept = torch.tensor([*range(0, 40, 3), *range(50, 80)])
    prefilled = tidekv.prefill(model, ids, selector=Fixed(kept), budget=len(kept))
    actual = ask(model, prefilled.cache, question)

    full = tidekv.prefill(model, ids, selector=None).cache
    hidden = torch.full((9, 89), float("-inf"))
    hidden[:, kept] = 0
    hidden[:, 80:] = torch.full((9, 9), float("-inf")).triu(1)
    with torch.no_grad():
        expected = model(
            question,
            attention_mask=hidden[None, None],
            use_cache=True,
            **{compat.cache_argument(model): full},
        ).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_no_eviction_equals_the_stock_cache(model, prompt):
    ids, question = prompt(80), prompt(9)
    actual = ask(model, tidekv.prefill(model, ids, selector=None).cache, question)
    with torch.no_grad():
        expected = model(torch.cat((ids, question), dim=1)).logits[:, -9:]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


class Fixed:
    """The same rows in every head."""

    window = 1

    def __init__(self, kept: torch.Tensor) -> None:
        self.kept = kept

    def check(self, prompt_tokens: int, rows: int) -> None:
        pass

    def select(self, layer: Any, rows: int, scoring: str) -> torch.Tensor:
        return self.kept.repeat(*layer.keys.shape[:2], 1)
