"""TideKV as published: the results of layer_major, and the tensors that its figures tell of."""

from typing import Any

import pytest
import torch

import tidekv
from tests.tidekv.conftest import TRANSFORMERS_5, make_tiny
from tests.tidekv.live_bytes import LiveBytes
from tidekv.errors import InfeasibleError
from tidekv.schedules import LayerMajorPublished
from tidekv.selectors import SnapKV

#: Of tiny models: layers, hidden size, query heads, KV heads, head size.
N, D_MODEL, HQ, HKV, D = 3, 32, 4, 2, 8


def read(model: Any, ids: torch.Tensor, schedule: str, **options: Any) -> Any:
    return tidekv.prefill(
        model, ids, schedule=schedule, budget=48, chunk_size=20, keep_indices=True, **options
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
@pytest.mark.parametrize("selector", [SnapKV(window=8), "adakv", "h2o"])
def test_it_keeps_what_layer_major_keeps(tiny, prompt, family, attention, selector):
    model, ids = tiny(family), prompt(96, batch=1 if selector == "adakv" else 2)
    ours, theirs = (
        read(model, ids, schedule, attention=attention, selector=selector)
        for schedule in ("layer_major", "layer_major_published")
    )
    torch.testing.assert_close(theirs.logits, ours.logits, rtol=1e-4, atol=1e-5)
    for mine, other in zip(ours.indices, theirs.indices, strict=True):
        if isinstance(mine, torch.Tensor):
            assert mine.equal(other)
        else:
            assert all(a.equal(b) for a, b in zip(mine[0], other[0], strict=True))
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.skipif(not TRANSFORMERS_5, reason="transformers 4 rotates nothing on meta tensors")
@pytest.mark.parametrize("chunk", [64, 512])
def test_the_peak_is_in_the_last_mlp_beside_three_versions_of_k_and_v(chunk: int) -> None:
    """The formula that fits each published figure: docs/tables.md, with b = 2."""
    width, rows, kept, window = 256, 512, 64, 8
    model = make_tiny("llama", intermediate_size=width).bfloat16().to("meta")
    ids = torch.zeros(1, rows, dtype=torch.int64, device="meta")
    with LiveBytes(model, ids) as live:
        tidekv.prefill(
            model,
            ids,
            schedule=LayerMajorPublished(chunk),
            selector=SnapKV(window=window),
            budget=kept,
            attention="flash_attention_2",
        )
    row = 2 * HKV * D * 2  # K and V
    assert live.peak == (
        (N - 1) * kept * row  # finished layers
        + rows * (D_MODEL * 2 + row + row)  # hidden states, K and V in chunks and in one
        + chunk * (3 * width * 2 + D_MODEL * 2 + row)  # the MLP, its input, K and V
        + 2 * (chunk + 1) * D * 2  # cos and sin
        + window * HQ * D * 2  # the window's queries
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_mask_stays_through_the_layer_and_heads_are_expanded(attention: str) -> None:
    model, rows, chunk = make_tiny("llama", intermediate_size=256), 512, 64
    ids = torch.randint(3, 97, (1, rows))
    masks: list[int] = []
    layer = model.model.layers[-1]
    layer.mlp.register_forward_pre_hook(lambda *_: masks.append(live.live["backend"]))
    with LiveBytes(model, ids) as live:
        tidekv.prefill(
            model,
            ids,
            schedule=LayerMajorPublished(chunk),
            selector=SnapKV(window=8),
            budget=64,
            attention=attention,
        )
    assert masks == [4 * chunk * seen for seen in range(chunk, rows + 1, chunk)]
    expanded = 2 * HQ * rows * D * 4
    scores = HQ * chunk * rows * 4 if attention == "eager" else 0
    assert live.own_peak["Act"] >= expanded + 2 * scores


def test_what_transformers_cannot_do_is_refused(tiny, prompt):
    with pytest.raises(InfeasibleError, match="sdpa knows no soft cap"):
        read(tiny("gemma2"), prompt(96), "layer_major_published", attention="sdpa")
