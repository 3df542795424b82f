"""Every selector under every schedule and in every cache: it works, or says why not."""

import functools
import itertools
from typing import Any

import pytest
import torch

import tidekv
from tests.tidekv.live_bytes import LiveBytes
from tidekv import methods
from tidekv.budgets import quantised
from tidekv.caches import QuantisedCache, QuantisedLayer
from tidekv.schedules import SCHEDULES
from tidekv.selectors import SELECTORS

S, BUDGET = 90, 40


def small(name: str) -> Any:
    """A selector whose window fits the budget."""
    parameters = SELECTORS[name].__dataclass_fields__
    return SELECTORS[name](**({"window": 8} if "window" in parameters else {}))


@pytest.mark.parametrize("selector", SELECTORS)
def test_late_schedules_keep_the_same_rows(tiny, prompt, selector):
    """And exactly the budget: rows of all heads and layers together, and bytes."""
    model, ids = tiny(), prompt(S, batch=2)
    found = {
        schedule: tidekv.prefill(
            model,
            ids,
            schedule=schedule,
            selector=small(selector),
            budget=BUDGET,
            chunk_size=17,
            keep_indices=True,
        )
        for schedule, made in SCHEDULES.items()
        if made.whole_layers
    }
    reference = found.pop("whole_prompt")
    assert sum(reference.cache.rows()) == 3 * BUDGET
    row = 2 * 8 * 4  # K and V, D, fp32
    rows = 2 * 2 * sum(reference.cache.rows()) * row  # batch, Hkv
    bookkeeping = 3 * 8 * (2 * 2 + 2) if SELECTORS[selector].head_budgets else 0
    assert reference.cache.nbytes() == rows + bookkeeping
    for prefilled in found.values():
        assert prefilled.cache.rows() == reference.cache.rows()
        for one, other in zip(prefilled.indices, reference.indices, strict=True):
            assert _same(one, other)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return all(map(_same, one, other))


@pytest.mark.parametrize(("selector", "schedule"), [*itertools.product(SELECTORS, SCHEDULES)])
def test_the_table_tells_what_happens(tiny, prompt, selector, schedule):
    """Whatever goes together answers; whatever doesn't is refused with the table's own words.

    And all that it allocates has a component.
    """
    model, ids = tiny(), prompt(S)
    for cache in methods.CACHES:
        reason = methods.obstacle(SCHEDULES[schedule], SELECTORS[selector])
        made = functools.partial(QuantisedCache, bits=4, group=8, residual=16)
        options = {
            "schedule": schedule,
            "selector": small(selector),
            "budget": BUDGET,
            "chunk_size": 30,
            "cache": made if cache == "kivi" else cache,
        }
        if reason is None:
            with LiveBytes(model, ids) as live:
                prefilled = tidekv.prefill(model, ids, **options)
            assert live.own_peak["other"] == 0
            output = tidekv.decode(model, ids, prefilled, max_new_tokens=4, eos_token_id=None)
            assert output.shape == (1, S + 4)
            continue
        with (
            LiveBytes(model, ids) as live,
            pytest.raises(tidekv.InfeasibleError) as error,
        ):
            tidekv.prefill(model, ids, **options)
        assert str(error.value) == reason
        assert live.peak == 0


@pytest.mark.parametrize("selector", SELECTORS)
def test_a_quantised_cache_holds_what_is_kept_in_fewer_bytes(tiny, prompt, selector):
    """The same rows, no further off than half a step, and the bytes of the formula."""
    model, ids = tiny(), prompt(S, batch=2)
    options = {"selector": small(selector), "budget": BUDGET, "chunk_size": 30}
    made = functools.partial(QuantisedCache, bits=4, group=8, residual=16)
    full = tidekv.prefill(model, ids, keep_indices=True, **options)
    few = tidekv.prefill(model, ids, keep_indices=True, cache=made, **options)
    assert few.cache.rows() == full.cache.rows()
    row = 8 * (4 + 2 * 32 / 8) / 8  # codes, and a scale and a zero for each group of 8
    expected = bookkeeping = 0.0
    for layer, same in zip(few.indices, full.indices, strict=True):
        assert _same(layer, same)
        if SELECTORS[selector].head_budgets:  # as many as any prompt needs
            least = int(0.2 * (BUDGET - 12)) + 12
            old, new = quantised(4 * BUDGET, 4, least=least, residual=16, group=8)
            expected += 2 * (old * row + new * 8 * 4)
            bookkeeping += 8 * (2 * 2 * 2 + 2)
            continue
        for kept in (head.shape[-1] for prompt_ in layer for head in prompt_):
            old = -(-max(kept - 16, 0) // 8) * 8
            expected += 2 * (old * row + (kept - old) * 8 * 4)
    tensors = [tensor for layer in few.cache.layers for tensor in layer.tensors()]
    held = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert held == few.cache.nbytes() == expected + bookkeeping
    assert held < 0.7 * full.cache.nbytes()
    for layer, same in zip(few.cache.layers, full.cache.layers, strict=True):
        new = torch.zeros(2, 2, 1, 8)
        for numbers, exact in zip(layer.update(new, new), same.update(new, new), strict=True):
            steps = (exact.amax() - exact.amin()) / 15
            assert (numbers - exact).abs().max() <= steps / 2 + 1e-6


@pytest.mark.parametrize("schedule", ["layer_major", "whole_prompt", "chunked"])
def test_cakes_layers_shrink_before_they_are_quantised(tiny, prompt, schedule):
    """Bit for bit what quantising the finally kept rows gives, whatever was kept meanwhile."""
    model, ids = tiny(), prompt(S)
    options = {"schedule": schedule, "selector": small("cake"), "budget": BUDGET}
    full = tidekv.prefill(model, ids, **options)
    made = functools.partial(QuantisedCache, bits=2, group=8, residual=16)
    few = tidekv.prefill(model, ids, cache=made, **options)
    assert len(set(full.cache.rows())) > 1
    for layer, rows in zip(few.cache.layers, full.cache.layers, strict=True):
        expected = QuantisedLayer(bits=2, group=8, residual=16)
        expected.store(rows.keys, rows.values, dropped=rows.dropped)
        expected.finish()
        assert all(map(torch.equal, layer.tensors(), expected.tensors()))


def test_the_table_has_every_pair():
    table = methods.table()
    assert table.keys() == SELECTORS.keys()
    assert all(row.keys() == {*SCHEDULES, "kivi"} for row in table.values())
    assert table["h2o"]["online"] is not None
    assert table["snapkv"]["online"] is None


@pytest.mark.parametrize("selector", ["snapkv", "pyramidkv", "adakv", "cake", "keydiff"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_question_at_once_is_token_by_token(tiny, prompt, selector, attention):
    """Also where layers or heads keep unequal numbers of rows."""
    from tidekv import compat

    model, ids, question = tiny(), prompt(S), prompt(7)
    model.set_attn_implementation(attention)
    try:
        logits = []
        for parts in (question.split(7, dim=1), question.split(1, dim=1)):
            cache = tidekv.prefill(model, ids, selector=small(selector), budget=BUDGET).cache
            with torch.no_grad():
                given = {compat.cache_argument(model): cache}
                logits.append(torch.cat([model(part, **given).logits for part in parts], dim=1))
    finally:
        model.set_attn_implementation("sdpa")
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
