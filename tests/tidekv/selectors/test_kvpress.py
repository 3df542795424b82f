"""Presses of kvpress as selectors: a stand-in's rows, and those of the real ones."""

from typing import Any

import pytest
import torch

import tidekv
from tests.tidekv.conftest import make_tiny
from tests.tidekv.selectors.cases import random_layer
from tidekv.errors import InfeasibleError
from tidekv.selectors import KvPress, Request

NEEDS = "kvpress (0.5.5 needs transformers < 5.3) isn't installed"


class LargestSums:
    """A press that keeps, in no order, the rows with the largest sums of their key."""

    window_size = 6

    def __init__(self, compression_ratio: float = 0.0, gathers: bool = True) -> None:
        self.compression_ratio = compression_ratio
        self.gathers = gathers

    def compress(self, module, hidden_states, keys, values, attentions, kwargs) -> Any:
        kept = int(keys.shape[2] * (1 - self.compression_ratio))
        rows = keys.sum(-1).topk(kept).indices.unsqueeze(-1).expand(-1, -1, -1, keys.shape[-1])
        if self.gathers:
            return keys.gather(2, rows).contiguous(), values.gather(2, rows).contiguous()
        return keys, values


def test_keeps_the_rows_of_the_press_in_order():
    layer = random_layer(60, 0, seed=1, batch=2)
    for rows in range(1, 60):  # floats fall on either side of a row
        kept = KvPress(LargestSums()).begin(Request(1, 60, rows)).select(layer).indices
        assert torch.equal(kept, layer.keys.sum(-1).topk(rows).indices.sort(dim=-1).values)


def test_a_press_is_asked_for_what_it_reads_and_left_as_it_was():
    press = LargestSums(0.25)
    selector = KvPress(press)
    assert selector.input_rows == 7 and selector.mandatory == 0
    selector.begin(Request(1, 60, 10)).select(random_layer(60, 0, seed=1))
    assert press.compression_ratio == selector.press.compression_ratio == 0.25
    with pytest.raises(
        InfeasibleError, match="LargestSums reads 7 rows, more than the prompt of 5"
    ):
        selector.check(Request(1, 5, 3))


def test_presses_that_keep_no_rows():
    with pytest.raises(InfeasibleError, match="such as kvpress.SnapKVPress"):
        KvPress("snapkv")
    selector = KvPress(LargestSums(gathers=False))
    with pytest.raises(InfeasibleError, match="LargestSums doesn't keep rows as they are"):
        selector.select(random_layer(60, 0, seed=1), 10, "blockwise")


class NeedsAForward(LargestSums):
    """A press that knows its ratio only once it has seen a forward, as DuoAttention's."""

    @property
    def compression_ratio(self) -> float:
        raise AssertionError("Forward pass must be run")

    @compression_ratio.setter
    def compression_ratio(self, _: float) -> None:
        pass


class NeedsThePrompt(LargestSums):
    """A press that reads the inputs of all rows."""

    def compress(self, module, hidden_states, keys, values, attentions, kwargs) -> Any:
        assert hidden_states is not None, "only supports prefill"


def test_presses_that_need_more_than_a_layer_end_shows():
    with pytest.raises(InfeasibleError, match="NeedsAForward can't .*Forward pass must be run"):
        KvPress(NeedsAForward())
    with pytest.raises(InfeasibleError, match="NeedsThePrompt can't .*only supports prefill"):
        KvPress(NeedsThePrompt()).select(random_layer(60, 0, seed=1), 10, "blockwise")


class ReadsEveryInput(LargestSums):
    """A press that reads all inputs and the rotary embedding, as ExpectedAttention's."""

    window_size = None  # as of Finch's, until it has seen a prompt

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[Any] = []

    def compress(self, module, hidden_states, keys, values, attentions, kwargs) -> Any:
        positions = torch.arange(keys.shape[2], keys.shape[2] + 5)[None]
        cos, _ = module.rotary_emb(keys, positions)
        cos_of_inputs, _ = kwargs["position_embeddings"]
        assert cos_of_inputs.shape[1] == hidden_states.shape[1]
        assert module.rotary_emb.inv_freq.shape[0] == cos.shape[2] // 2
        assert hidden_states.shape[1] == keys.shape[2]
        return super().compress(module, hidden_states, keys, values, attentions, kwargs)


@pytest.mark.parametrize("schedule", ["layer_major", "whole_prompt", "chunked"])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_presses_that_read_every_input(tiny, prompt, family, schedule):
    model, selector = tiny(family), KvPress(ReadsEveryInput(), every_input=True)
    options = {"schedule": schedule, "selector": selector, "budget": 30, "chunk_size": 17}
    assert tidekv.prefill(model, prompt(90), **options).cache.rows() == [30] * 3
    for layer in model.model.layers:
        assert not hasattr(layer.self_attn, "rotary_emb")
    with pytest.raises(InfeasibleError, match="KvPress needs what attention was given for every"):
        tidekv.prefill(model, prompt(90), **{**options, "schedule": "online"})


def test_known_presses_read_every_input_anyway():
    known = type("ExpectedAttentionPress", (LargestSums,), {})
    derived = type("Derived", (known,), {})
    wrapper = LargestSums()
    wrapper.press = derived()
    assert not KvPress(LargestSums()).every_input
    assert all(KvPress(press).every_input for press in (known(), derived(), wrapper))
    assert KvPress(known()).begin(Request(1, 60, 10)).selector.every_input


def real_presses() -> dict[str, Any]:
    kvpress = pytest.importorskip("kvpress", reason=NEEDS)
    snap = {"window_size": 8, "kernel_size": 5}
    finch = kvpress.FinchPress()
    finch.window_size = 8
    return {
        "snapkv": kvpress.SnapKVPress(**snap),
        "tova": kvpress.TOVAPress(),
        "keydiff": kvpress.KeyDiffPress(),
        "knorm": kvpress.KnormPress(),
        "streamingllm": kvpress.StreamingLLMPress(),
        "lagkv": kvpress.LagKVPress(lag_size=16),
        "cur": kvpress.CURPress(),
        "chunkkv": kvpress.ChunkKVPress(kvpress.SnapKVPress(**snap), chunk_length=5),
        "entropy": kvpress.EntropyGatedChunkKVPress(kvpress.SnapKVPress(**snap), chunk_length=5),
        "pyramidkv": kvpress.PyramidKVPress(**snap, beta=4),
        "criticalkv": kvpress.CriticalKVPress(kvpress.SnapKVPress(**snap)),
        "rerotation": kvpress.KeyRerotationPress(kvpress.SnapKVPress(**snap)),
        "finch": finch,
        "expected": kvpress.ExpectedAttentionPress(),
        "leverage": kvpress.LeverageScorePress(),
        "noncausal": kvpress.NonCausalAttnPress(),
        "compactor": kvpress.CompactorPress(),
        "cap": kvpress.CapPress(),
        "chunk": kvpress.ChunkPress(kvpress.SnapKVPress(**snap), chunk_length=45),
        "block": kvpress.BlockPress(kvpress.KeyDiffPress(), block_size=16),
    }


@pytest.mark.parametrize(
    "name",
    [
        "snapkv",
        "tova",
        "keydiff",
        "knorm",
        "streamingllm",
        "lagkv",
        "cur",
        "chunkkv",
        "entropy",
        "pyramidkv",
        "criticalkv",
        "rerotation",
        "finch",
        "expected",
        "leverage",
        "noncausal",
        "compactor",
        "cap",
        "chunk",
        "block",
    ],
)
def test_keeps_what_the_press_keeps_in_the_stock_forward(name):
    press = real_presses()[name]
    model = make_tiny("llama", num_hidden_layers=2)
    # No token twice, whose values would be the same.
    ids = 3 + torch.randperm(94, generator=torch.Generator().manual_seed(1))[None, :90]
    kept = tidekv.prefill(
        model, ids, selector=KvPress(press), budget=30, chunk_size=17, keep_indices=True
    ).indices
    assert kept is not None
    press.compression_ratio = 1 - 30.5 / 90
    with torch.no_grad():
        full = model(ids, use_cache=True).past_key_values
        # As every press, but Finch's own looks for a token that ends the context.
        with super(type(press), press).__call__(model) if name == "finch" else press(model):
            cache = model(ids, use_cache=True).past_key_values
    for rows, every, layer in zip(kept, full.layers, cache.layers, strict=True):
        same = (layer.values.unsqueeze(3) == every.values.unsqueeze(2)).all(-1)  # (B, Hkv, K, S)
        assert torch.equal(same.int().argmax(-1).sort(dim=-1).values, rows)
    if name != "pyramidkv":  # which spreads
        assert {rows.shape[2] for rows in kept} == {30}
