"""Presses of kvpress as selectors: a stand-in's rows, and those of the real ones."""

from typing import Any

import pytest
import torch

from tests.tidekv.conftest import make_tiny
from tests.tidekv.selectors.cases import random_layer
from tidekv.errors import InfeasibleError
from tidekv.selectors import KvPress, LayerEnd, Request

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
    """A press that reads the inputs of all rows, as ExpectedAttention's."""

    def compress(self, module, hidden_states, keys, values, attentions, kwargs) -> Any:
        assert hidden_states is not None, "only supports prefill"


def test_presses_that_need_more_than_a_layer_end_shows():
    with pytest.raises(InfeasibleError, match="NeedsAForward can't .*Forward pass must be run"):
        KvPress(NeedsAForward())
    with pytest.raises(InfeasibleError, match="NeedsThePrompt can't .*only supports prefill"):
        KvPress(NeedsThePrompt()).select(random_layer(60, 0, seed=1), 10, "blockwise")


def real_presses() -> dict[str, Any]:
    kvpress = pytest.importorskip("kvpress", reason=NEEDS)
    snap = {"window_size": 8, "kernel_size": 5}
    return {
        "snapkv": kvpress.SnapKVPress(**snap),
        "tova": kvpress.TOVAPress(),
        "keydiff": kvpress.KeyDiffPress(),
        "knorm": kvpress.KnormPress(),
        "streamingllm": kvpress.StreamingLLMPress(),
        "lagkv": kvpress.LagKVPress(lag_size=16),
        "chunkkv": kvpress.ChunkKVPress(kvpress.SnapKVPress(**snap), chunk_length=5),
        "pyramidkv": kvpress.PyramidKVPress(**snap, beta=4),
        "criticalkv": kvpress.CriticalKVPress(kvpress.SnapKVPress(**snap)),
    }


def layer_ends(model: Any, ids: torch.Tensor, rows: int) -> list[LayerEnd]:
    """What a schedule would show of each layer, by hooks."""
    ends = []

    def see(module: Any, _: Any, kwargs: dict[str, Any], __: Any) -> None:
        cached = kwargs["past_key_values"].layers[module.layer_idx]
        hidden, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
        end = LayerEnd(
            module.layer_idx,
            hidden.new_empty(1, 4, 0, 8),
            cached.keys,
            cached.values,
            module.scaling,
            attention=module,
            inputs=hidden[:, -rows:],
            rope=(cos[:, -rows:], sin[:, -rows:]),
        )
        ends.append(end)

    hooks = [
        layer.self_attn.register_forward_hook(see, with_kwargs=True) for layer in model.model.layers
    ]
    with torch.no_grad():
        model(ids, use_cache=True)
    for hook in hooks:
        hook.remove()
    return ends


@pytest.mark.parametrize(
    "name",
    [
        "snapkv",
        "tova",
        "keydiff",
        "knorm",
        "streamingllm",
        "lagkv",
        "chunkkv",
        "pyramidkv",
        "criticalkv",
    ],
)
def test_keeps_what_the_press_keeps_in_the_stock_forward(name, prompt):
    press = real_presses()[name]
    model = make_tiny("llama", num_hidden_layers=2)
    ids = prompt(90)
    selector = KvPress(press)
    choice = selector.begin(Request(2, 90, 30))
    kept = [choice.select(end).indices for end in layer_ends(model, ids, selector.input_rows)]
    ends = layer_ends(model, ids, 1)
    press.compression_ratio = 1 - 30.5 / 90
    with torch.no_grad(), press(model):
        cache = model(ids, use_cache=True).past_key_values
    for rows, end, layer in zip(kept, ends, cache.layers, strict=True):
        same = (layer.keys.unsqueeze(3) == end.keys.unsqueeze(2)).all(-1)  # (B, Hkv, K, S)
        assert torch.equal(same.int().argmax(-1).sort(dim=-1).values, rows)
    if name not in ("chunkkv", "pyramidkv"):  # which round, and spread
        assert {rows.shape[2] for rows in kept} == {30}
