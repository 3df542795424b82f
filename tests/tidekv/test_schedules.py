"""Schedules compute what the stock forward computes, and hold what they promise to hold."""

from typing import Any

import pytest
import torch

import tidekv
from tests.tidekv.live_bytes import LiveBytes
from tidekv.models import FAMILIES
from tidekv.models.tight import HEAD_NORM
from tidekv.schedules import SCHEDULES, HeadOffload, LayerMajor, WholePrompt
from tidekv.selectors import SnapKV

#: Schedules that can keep every row, and those that evict once a layer is complete.
KEEPING = [name for name, schedule in SCHEDULES.items() if schedule.keeps_all]
LATE = [name for name, schedule in SCHEDULES.items() if schedule.whole_layers]
S = 96
CHUNKS = (1, 7, 64, S, S + 5)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def stock_states(model: Any, ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The input of every layer, and the last token's logits (B, V), by transformers."""
    with torch.no_grad():
        output = model(ids, output_hidden_states=True, use_cache=False)
    return list(output.hidden_states[: len(model.model.layers)]), output.logits[:, -1]


def layer_inputs(model: Any, ids: torch.Tensor, **options: Any) -> tuple[list[torch.Tensor], Any]:
    """The input of every layer under layer_major, its chunks put together, and the prefill."""
    seen: list[list[torch.Tensor]] = [[] for _ in model.model.layers]
    rows = ids.shape[1]

    def keep(index: int) -> Any:
        def hook(_: Any, args: tuple[torch.Tensor]) -> None:
            if sum(part.shape[1] for part in seen[index]) < rows:
                seen[index].append(args[0].clone())

        return hook

    handles = [
        layer.input_layernorm.register_forward_pre_hook(keep(index))
        for index, layer in enumerate(model.model.layers)
    ]
    prefilled = tidekv.prefill(model, ids, schedule="layer_major", **options)
    for handle in handles:
        handle.remove()
    return [torch.cat(parts, dim=1) for parts in seen], prefilled


@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize("family", HEAD_NORM)
def test_every_layer_gets_what_the_stock_forward_gives_it(tiny, prompt, family, chunk_size):
    model, ids = tiny(family), prompt(S, batch=2)
    expected, logits = stock_states(model, ids)
    states, prefilled = layer_inputs(
        model, ids, selector="snapkv", budget=0.5, chunk_size=chunk_size
    )
    for actual, stock in zip(states, expected, strict=True):
        assert relative(actual, stock) <= 1e-5
    assert relative(prefilled.logits, logits) <= 1e-5


@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_layer_major_equals_one_shot(tiny, prompt, family, attention, chunk_size):
    model, ids = tiny(family), prompt(S - 1, batch=2)
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
    actual = tidekv.prefill(model, ids, evict=False, chunk_size=chunk_size, attention=attention)
    assert relative(actual.logits, expected) <= 1e-5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("schedule", KEEPING)
def test_schedules_equal_one_shot(tiny, prompt, schedule, attention):
    for family in ("qwen3", "phi3"):
        model, ids = tiny(family), prompt(S)
        with torch.no_grad():
            logits = model(ids).logits[:, -1]
        prefilled = tidekv.prefill(
            model, ids, schedule=schedule, attention=attention, evict=False, chunk_size=20
        )
        assert relative(prefilled.logits, logits) <= 1e-5
        assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("piece_rows", [1, 5, 32, 100])
def test_pieces_are_the_chunk(tiny, prompt, piece_rows):
    model, ids = tiny("qwen3"), prompt(S)
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
    for schedule in (LayerMajor(64, piece_rows), WholePrompt(mlp_rows=piece_rows)):
        prefilled = tidekv.prefill(model, ids, schedule=schedule, evict=False)
        assert relative(prefilled.logits, expected) <= 1e-5


def test_online_drifts_where_layer_major_does_not(tiny, prompt):
    """Later chunks see the compressed cache."""
    model, ids = tiny(), prompt(S)
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
    for selector in (SnapKV(window=8), "recent", "keydiff"):
        logits = {
            schedule: tidekv.prefill(
                model, ids, schedule=schedule, selector=selector, budget=24, chunk_size=16
            ).logits
            for schedule in ("layer_major", "online")
        }
        assert relative(logits["layer_major"], expected) <= 1e-5
        assert relative(logits["online"], expected) > 1e-3


def test_online_attends_to_what_is_kept_alone(tiny, prompt):
    """Each chunk equals the stock forward on the kept rows of before, hidden by a mask."""
    model, ids, chunk, kept = tiny(num_hidden_layers=1), prompt(60), 20, 28
    online = tidekv.prefill(
        model, ids, schedule="online", selector="recent", budget=kept, chunk_size=chunk
    )
    # One layer, the newest rows: a row sees its own chunk and the newest of those before it.
    hidden = torch.full((60, 60), float("-inf"))
    for row in range(60):
        begin = row // chunk * chunk
        hidden[row, max(begin - kept, 0) : row + 1] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=hidden[None, None]).logits[:, -1]
    torch.testing.assert_close(online.logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk_size", [5, 13, 64])
def test_online_keeps_its_budget_and_says_which(tiny, prompt, chunk_size):
    model, ids = tiny(), prompt(S, batch=2)
    prefilled = tidekv.prefill(
        model,
        ids,
        schedule="online",
        selector=SnapKV(window=8, sinks=2),
        budget=24,
        chunk_size=chunk_size,
        keep_indices=True,
    )
    assert prefilled.cache.rows() == [24] * 3
    assert prefilled.cache.get_seq_length() == S
    for positions in prefilled.indices:
        assert positions.shape == (2, 2, 24)
        assert (positions.diff(dim=-1) > 0).all()
        assert (positions[..., :2] == torch.arange(2)).all()
        assert (positions[..., -8:] == torch.arange(S - 8, S)).all()
    # The first layer's keys don't depend on the cache: they are those of the whole prompt.
    full = tidekv.prefill(model, ids, evict=False).cache.layers[0]
    rows = prefilled.indices[0].unsqueeze(-1).expand(-1, -1, -1, 8)
    torch.testing.assert_close(prefilled.cache.layers[0].keys, full.keys.gather(2, rows))


@pytest.mark.parametrize("evict", [True, False])
def test_host_parts_change_no_bit(tiny, prompt, evict):
    """Weights in two slots, the bridge on the host, caches parked: the same operators."""
    for family in ("llama", "phi3"):
        model, ids = tiny(family), prompt(S, batch=2)
        request = {"evict": evict, "budget": 50, "keep_indices": evict}
        plain = tidekv.prefill(model, ids, schedule=LayerMajor(20), **request)
        before = [parameter.data_ptr() for parameter in model.parameters()]
        for options in (
            {"host_bridge": True},
            {"park_caches": True},
            {"host_bridge": True, "park_caches": True, "stream_weights": True},
        ):
            other = tidekv.prefill(model, ids, schedule=LayerMajor(20, **options), **request)
            assert torch.equal(plain.logits, other.logits)
            for one, two in zip(plain.cache.layers, other.cache.layers, strict=True):
                assert torch.equal(one.keys, two.keys)
                assert torch.equal(one.values, two.values)
            assert all(map(torch.equal, plain.indices or (), other.indices or ()))
        assert before == [parameter.data_ptr() for parameter in model.parameters()]


@pytest.mark.parametrize("where", ["layer", "chunk"])
def test_streamed_weights_come_home_after_an_error(tiny, prompt, where):
    model = tiny()
    before = [parameter.data_ptr() for parameter in model.parameters()]
    module = model.model.layers[1] if where == "layer" else model.model.layers[1].mlp.down_proj
    module = module if where == "chunk" else module.input_layernorm

    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    handle = module.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        tidekv.prefill(model, prompt(S), budget=50, schedule=LayerMajor(20, stream_weights=True))
    handle.remove()
    assert before == [parameter.data_ptr() for parameter in model.parameters()]
    tidekv.prefill(model, prompt(S), budget=50)


def test_one_head_is_there_at_a_time(tiny):
    model, rows = tiny(), 512
    ids = torch.randint(3, 97, (1, rows))
    with LiveBytes(model, ids) as live:
        tidekv.prefill(model, ids, schedule=HeadOffload(64), evict=False)
    on_host = 3 * 2 * 2 * rows * 8 * 4  # layers, K and V, Hkv, S, D, fp32
    visiting = 2 * rows * 8 * 4  # K and V of a head; on the CPU a view of the host's
    assert on_host <= live.own_peak["KV_res/full"] <= on_host + visiting


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ],
    ids=["dynamic", "llama3"],
)
def test_rope_tables_are_those_of_the_whole_prompt(tiny, prompt, rope):
    """Dynamic scaling depends on the longest position of a call; a chunk's own is too short."""
    model = tiny("llama", rope_scaling=rope, max_position_embeddings=64)
    ids = prompt(S)
    tidekv.prefill(model, prompt(8), selector=None)  # leaves other tables behind
    prefilled = tidekv.prefill(model, ids, selector=None, chunk_size=16)
    _, logits = stock_states(model, ids)
    assert relative(prefilled.logits, logits) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_late_schedules_keep_the_same_rows(tiny, prompt, family):
    model, ids = tiny(family), prompt(S, batch=2)
    selector = SnapKV(window=8, sinks=2, block_size=16)
    kept = {
        (schedule, scoring): tidekv.prefill(
            model,
            ids,
            schedule=schedule,
            selector=selector,
            scoring=scoring,
            budget=24,
            chunk_size=13,
            keep_indices=True,
        )
        for schedule in LATE
        for scoring in ("blockwise", "dense")
    }
    reference = kept["whole_prompt", "dense"]
    assert len(reference.indices) == 3
    for prefilled in kept.values():
        assert prefilled.cache.rows() == [24, 24, 24]
        for actual, expected in zip(prefilled.indices, reference.indices, strict=True):
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("selector", ["snapkv", "cake"])
@pytest.mark.parametrize("schedule", LATE)
def test_cache_holds_the_selected_rows(tiny, prompt, schedule, selector):
    model, ids = tiny("mistral"), prompt(S)
    options = {"schedule": schedule, "chunk_size": 40}
    full = tidekv.prefill(model, ids, selector=None, **options)
    kept = tidekv.prefill(model, ids, selector=selector, budget=50, keep_indices=True, **options)
    for layer, whole, indices in zip(
        kept.cache.layers, full.cache.layers, kept.indices, strict=True
    ):
        for head in range(2):
            torch.testing.assert_close(layer.keys[0, head], whole.keys[0, head][indices[0, head]])
            torch.testing.assert_close(
                layer.values[0, head], whole.values[0, head][indices[0, head]]
            )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_second_request_is_like_the_first(tiny, prompt, schedule):
    model, ids = tiny(), prompt(S)
    first = tidekv.prefill(model, ids, schedule=schedule, budget=50, keep_indices=True)
    tidekv.prefill(model, prompt(70), schedule=schedule, budget=50)
    again = tidekv.prefill(model, ids, schedule=schedule, budget=50, keep_indices=True)
    assert torch.equal(first.logits, again.logits)
    assert all(map(torch.equal, first.indices, again.indices))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_is_left_on_the_model(tiny, prompt, schedule):
    model = tiny()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    hooks = [
        (len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in m.__dict__)
        for m in model.modules()
    ]
    tidekv.generate(model, prompt(S), schedule=schedule, budget=50, max_new_tokens=2)
    assert before.keys() == dict(model.named_modules()).keys()
    assert hooks == [
        (len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in m.__dict__)
        for m in model.modules()
    ]


def test_layer_major_memory(tiny):
    """Component by component: what the schedule promises, to the byte where it is a formula."""
    model = tiny("llama", intermediate_size=256)
    rows, chunk, kept = 4096, 128, 64
    ids = torch.randint(3, 97, (1, rows))
    with LiveBytes(model, ids) as live:
        full_at_logits: list[int] = []
        handle = model.lm_head.register_forward_pre_hook(
            lambda *_: full_at_logits.append(live.live["KV_res/full"])
        )
        prefilled = tidekv.prefill(model, ids, budget=kept, chunk_size=chunk)
    handle.remove()
    full = 2 * 2 * rows * 8 * 4  # K and V, Hkv, S, D, fp32
    compact = 3 * 2 * 2 * kept * 8 * 4  # layers, K and V, Hkv, rows, D
    assert live.own_peak["KV_res/full"] == full
    assert live.own_peak["KV_res/compact"] == compact == prefilled.cache.nbytes()
    assert live.own_peak["Hidden"] <= rows * 32 * 4 + 32 * 4  # the bridge, and the last row
    # In the MLP: its input, gate and up; nothing of the attention before it.
    assert live.own_peak["Act"] == chunk * (32 + 2 * 256) * 4
    assert full_at_logits == [0]
    assert live.own_peak["other"] == 0
    # What is left: the cache and the logits.
    assert +live.live == {"KV_res/compact": compact, "Temp": prefilled.logits.nbytes}


def test_whole_prompt_components(tiny):
    model = tiny("llama", intermediate_size=256)
    rows, kept = 1024, 64
    ids = torch.randint(3, 97, (1, rows))
    with LiveBytes(model, ids) as live:
        prefilled = tidekv.prefill(model, ids, schedule="whole_prompt", budget=kept)
    assert live.own_peak["KV_res/full"] == 2 * 2 * rows * 8 * 4
    assert live.own_peak["KV_res/compact"] == prefilled.cache.nbytes()
    # Embeddings, a layer's input, its output: three at a time.
    assert live.own_peak["Hidden"] == 3 * rows * 32 * 4
    assert live.own_peak["Act"] >= 3 * rows * 256 * 4
    assert live.own_peak["other"] == 0


def test_temp_grows_by_the_scores_alone(tiny):
    """One fp32 score per KV head and position; some blocks of keys are full at both lengths."""
    model = tiny()
    peaks = []
    for rows in (6144, 12288):
        ids = torch.randint(3, 97, (1, rows))
        with LiveBytes(model, ids) as live:
            tidekv.prefill(model, ids, budget=128)
        peaks.append(live.own_peak["Temp"])
    assert peaks[1] - peaks[0] <= 4 * model.config.num_key_value_heads * 6144
