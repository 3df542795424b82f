"""The promises on a real model with real text."""

from typing import Any

import pytest
import torch

import tidekv
from tests.tidekv.live_bytes import LiveBytes
from tests.tidekv.test_schedules import layer_inputs, relative, stock_states


@pytest.fixture(params=[512, pytest.param(4096, marks=pytest.mark.slow)])
def ids(request, demo_ids) -> torch.Tensor:
    return demo_ids[:, : request.param]


def test_layer_major_is_exact(smollm2, ids):
    model = smollm2[0]
    expected, logits = stock_states(model, ids)
    states, prefilled = layer_inputs(model, ids, budget=256)
    for actual, stock in zip(states, expected, strict=True):
        assert relative(actual, stock) <= 1e-5
    assert relative(prefilled.logits, logits) <= 1e-5


def test_schedules_and_scorings_keep_the_same_rows(smollm2, ids):
    model = smollm2[0]

    def kept(**options: Any) -> list[torch.Tensor]:
        return tidekv.prefill(model, ids, budget=256, keep_indices=True, **options).indices

    reference = kept(schedule="whole_prompt", scoring="dense")
    assert len(reference) == 30
    for schedule, scoring in (("whole_prompt", "blockwise"), ("layer_major", "blockwise")):
        for actual, expected in zip(
            kept(schedule=schedule, scoring=scoring), reference, strict=True
        ):
            assert torch.equal(actual, expected)


def test_no_eviction_generates_what_transformers_generates(smollm2, ids):
    model = smollm2[0]
    options = {"max_new_tokens": 32, "do_sample": False}
    plain = model.generate(ids, **options)
    assert torch.equal(tidekv.generate(model, ids, selector=None, **options), plain)


@pytest.mark.slow
@pytest.mark.parametrize("selector", ["snapkv", None])
@pytest.mark.parametrize("schedule", ["whole_prompt", "layer_major"])
def test_demo_prompt_is_answered(smollm2, demo_ids, schedule, selector):
    model, tokenizer = smollm2
    new_tokens = 24
    assert demo_ids.shape[1] + new_tokens <= model.config.max_position_embeddings
    output = tidekv.generate(
        model,
        demo_ids,
        schedule=schedule,
        selector=selector,
        max_new_tokens=new_tokens,
        do_sample=False,
    )
    answer = tokenizer.decode(output[0, demo_ids.shape[1] :], skip_special_tokens=True)
    assert "lighthouse" in answer


@pytest.mark.slow
def test_construction_peak_is_at_most_a_third(smollm2, demo_ids):
    """Above the steady state: the final cache is subtracted, the model was never counted."""
    model = smollm2[0]
    above = {}
    for schedule in ("whole_prompt", "layer_major"):
        with LiveBytes(model, demo_ids) as live:
            prefilled = tidekv.prefill(model, demo_ids, schedule=schedule, chunk_size=512)
        above[schedule] = live.peak - prefilled.cache.nbytes()
    assert 3 * above["layer_major"] <= above["whole_prompt"]
