"""Whatever a cache holds is resident KV, and nothing else is, whichever class it has."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticCache

from memtrace import scopes
from memtrace.analysis.accounts import Account, accounts
from memtrace.trace.reader import ProcessTrace
from tests.record.scripts import transformer

Record = Callable[..., ProcessTrace]

PROMPT = torch.arange(2, 42)[None]


@pytest.fixture(scope="module")
def llama() -> Any:
    return transformer.model("llama", "cpu")


def held(*things: Any) -> int:
    """Bytes of the storages under some tensors, each counted once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in things}.values())


def kept_by(layers: list[Any]) -> int:
    return held(*(tensor for layer in layers for tensor in (layer.keys, layer.values)))


def ends(process: ProcessTrace) -> tuple[int, int]:
    """Resident KV at the end, and its compact part."""
    account: Account = accounts(process)[0]
    compact = account.details.get("KV_res/compact")
    total = int(account.components["KV_res"].levels[-1])
    return total, int(compact.levels[-1]) if compact else 0


def recorded(record: Record, model: nn.Module, cache: Any, *steps: torch.Tensor) -> ProcessTrace:
    """Run the model over several inputs with one cache."""

    def work() -> None:
        with torch.no_grad():
            for ids in steps:
                model(ids, past_key_values=cache, use_cache=True)

    return record(work)


def test_a_dynamic_cache(record: Record, llama: Any) -> None:
    cache = DynamicCache(config=llama.config)
    process = recorded(record, llama, cache, PROMPT, PROMPT[:, :1])
    assert ends(process) == (kept_by(cache.layers), 0)
    assert kept_by(cache.layers) == 41 * 2 * 4 * 64 * 4  # tokens, K and V, layers, width, bytes


def test_a_static_cache_counts_all_that_it_reserves(record: Record, llama: Any) -> None:
    cache = StaticCache(config=llama.config, max_cache_len=100)
    total, _ = ends(recorded(record, llama, cache, PROMPT))
    assert 0 <= total - kept_by(cache.layers) < 100  # and its counters
    assert kept_by(cache.layers) == 100 * 2 * 4 * 64 * 4


def test_a_sliding_window_keeps_the_whole_prompt_that_it_is_a_view_of(record: Record) -> None:
    model = transformer.model("mistral", "cpu")
    cache = DynamicCache(config=model.config)
    ids = torch.arange(2, 302)[None]
    total, _ = ends(recorded(record, model, cache, ids))
    assert 0 <= total - kept_by(cache.layers) < 100
    assert kept_by(cache.layers) == 300 * 2 * 4 * 64 * 4


def test_quantized_codes_are_compact_and_what_quantizing_takes_is_temp(
    record: Record, llama: Any
) -> None:
    class Halved(cache_utils.QuantizedLayer):
        """A quantizer of our own, since those of transformers need other packages."""

        def _quantize(self, tensor: torch.Tensor, axis: int) -> tuple[torch.Tensor, dict]:
            return tensor.half(), {"scale": torch.ones(8)}

        def _dequantize(self, q: tuple[torch.Tensor, dict]) -> torch.Tensor:
            return q[0].float()

    cache = Cache(layers=[Halved() for _ in range(4)])
    process = recorded(record, llama, cache, PROMPT, PROMPT[:, :1])
    codes = [q for one in cache.layers for q in (one._quantized_keys, one._quantized_values)]
    compact = held(*(q[0] for q in codes), *(q[1]["scale"] for q in codes))
    assert ends(process) == (compact + kept_by(cache.layers), compact)


@pytest.mark.skipif(
    not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="this transformers has no fp8 cache"
)
def test_an_fp8_cache(record: Record, llama: Any) -> None:
    cache = cache_utils.QuantizedCache("fp8", llama.config)
    process = recorded(record, llama, cache, PROMPT, PROMPT[:, :1])
    codes = [q for one in cache.layers for q in (one._quantized_keys, one._quantized_values)]
    compact = held(*(tensor for q in codes for tensor in q))
    assert ends(process) == (compact + kept_by(cache.layers), compact)
    assert accounts(process)[0].components["Temp"].peak >= 40 * 64 * 4  # a float copy of the keys


def test_beam_search_reorders_and_assisted_decoding_crops(record: Record, llama: Any) -> None:
    kept: list[Any] = []

    def beams() -> None:
        out = llama.generate(
            PROMPT, num_beams=3, max_new_tokens=4, return_dict_in_generate=True, use_cache=True
        )
        kept.append(out.past_key_values)

    account = accounts(record(beams))[0]
    peak = account.components["KV_res"].peak
    assert peak >= 3 * 40 * 2 * 4 * 64 * 4  # three beams
    assert account.components["Temp"].peak < peak  # their copies are no sampling

    cache = DynamicCache(config=llama.config)

    def crop() -> None:
        with torch.no_grad():
            llama(PROMPT, past_key_values=cache)
            cache.crop(-10)
            cache.batch_repeat_interleave(2)

    assert ends(record(crop)) == (kept_by(cache.layers), 0)
    assert kept_by(cache.layers) == 2 * 30 * 2 * 4 * 64 * 4


def test_an_encoder_and_a_decoder_each_have_theirs(record: Record) -> None:
    kept: list[Any] = []

    def work() -> None:
        out = transformer.run("t5", "cpu", "no_grad", "eager", "forward")[1]
        kept.append(out.past_key_values)

    process = record(work)
    own, cross = kept[0].self_attention_cache, kept[0].cross_attention_cache
    assert ends(process) == (kept_by([*own.layers, *cross.layers]), 0)
    assert cross.layers[0].keys.shape[2] == transformer.PROMPT


def test_states_of_linear_attention_are_resident(record: Record) -> None:
    kept: list[Any] = []

    def work() -> None:
        out = transformer.run("mamba", "cpu", "no_grad", "eager", "forward")[1]
        kept.append(vars(out).get("cache") or vars(out).get("cache_params"))

    total, _ = ends(record(work))
    states = 4 * 4 * transformer.HIDDEN * (16 + 4) * 4  # layers, width, SSM and convolution
    assert total == states


def test_a_cache_class_of_the_users_own(record: Record, llama: Any) -> None:
    """It overrides what stores, so transformers' own method is never called."""

    class Strided(DynamicCache):
        def update(self, keys, values, layer_idx, *args, **kwargs):
            while len(self.layers) <= layer_idx:
                self.layers.append(DynamicLayer())
            layer = self.layers[layer_idx]
            layer.keys, layer.values = keys.clone(), values.clone()
            layer.is_initialized = True
            return layer.keys, layer.values

    plain = Strided.update
    cache = Strided()
    assert ends(recorded(record, llama, cache, PROMPT)) == (kept_by(cache.layers), 0)
    assert Strided.update is plain  # and the class is as it was


class Legacy(nn.Module):
    """A decoder that stores as models did before there were cache classes."""

    def __init__(self, store: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.key = nn.Linear(8, 8)
        self.store = store

    def forward(self, x: torch.Tensor, past_key_values: Any = None) -> Any:
        keys = self.key(x)
        if past_key_values is not None:
            past_key_values.put(keys) if hasattr(past_key_values, "put") else None
        return Output(x * 2, self.store(keys))


class Output:
    def __init__(self, logits: torch.Tensor, past_key_values: Any) -> None:
        self.logits = logits
        self.past_key_values = past_key_values


def test_tuples_of_keys_and_values(record: Record) -> None:
    kept: list[Any] = []

    def work() -> None:
        with torch.no_grad():
            out = Legacy(lambda keys: ((keys, keys + 1), (keys + 2, keys + 3)))(
                torch.ones(1, 20, 8)
            )
        kept.append(out)

    process = record(work)
    assert ends(process) == (4 * 20 * 8 * 4, 0)
    assert accounts(process)[0].components["Temp"].levels[-1] == 20 * 8 * 4  # the logits


def test_an_object_that_is_no_cache_of_transformers(record: Record) -> None:
    """Booked when the model returns it; while the model ran it was workspace."""

    class Store:
        def __init__(self, keys: torch.Tensor) -> None:
            self.key_cache = [keys]

    kept: list[Any] = []

    def work() -> None:
        model = Legacy(Store)
        with torch.no_grad():
            for _ in range(2):
                kept.append(model(torch.ones(1, 20, 8)).past_key_values)

    assert ends(record(work)) == (2 * 20 * 8 * 4, 0)


def test_where_the_rules_of_caches_are_wrong(record: Record) -> None:
    """A method that stores under another name is not seen, nor what only the model keeps."""

    class Store:
        def __init__(self) -> None:
            self.kept: list[torch.Tensor] = []

        def put(self, keys: torch.Tensor) -> None:
            self.kept.append(keys)

    store = Store()

    def work() -> None:
        with torch.no_grad():
            Legacy(lambda keys: None)(torch.ones(1, 20, 8), past_key_values=store)

    process = record(work)
    assert ends(process) == (0, 0)
    assert accounts(process)[0].components["Act"].levels[-1] == 20 * 8 * 4


def test_compact_kv_stays_compact_in_a_cache(record: Record, llama: Any) -> None:
    """What the user's code called compact is not called full by the rule that finds it stored."""
    cache = DynamicCache(config=llama.config)

    def work() -> None:
        with torch.no_grad():
            llama(PROMPT, past_key_values=cache)
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[..., -8:, :].clone(), layer.values.clone()
                scopes.retag(layer.keys, "KV_res/compact")
            cache.crop(0)

    assert ends(record(work))[1] == 8 * 4 * 64 * 4
