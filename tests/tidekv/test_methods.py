"""Every selector under every schedule and in every cache: it works, or says why not."""

import functools
import itertools
from typing import Any

import pytest
import torch

import tidekv
from tests.tidekv.live_bytes import LiveBytes
from tidekv import methods
from tidekv.caches import QuantisedCache
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
    """Whatever goes together answers; whatever doesn't is refused with the table's own words."""
    model, ids = tiny(), prompt(S)
    for cache in methods.CACHES:
        reason = methods.obstacle(SCHEDULES[schedule], SELECTORS[selector], cache == "kivi")
        made = functools.partial(QuantisedCache, bits=4, group=8, residual=16)
        options = {
            "schedule": schedule,
            "selector": small(selector),
            "budget": BUDGET,
            "chunk_size": 30,
            "cache": made if cache == "kivi" else cache,
        }
        if reason is None:
            prefilled = tidekv.prefill(model, ids, **options)
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
