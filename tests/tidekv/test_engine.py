"""prefill, decode and generate: what they accept, and that generate is transformers' own."""

import copy
import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TextIteratorStreamer,
)

import tidekv
from tests.tidekv.live_bytes import LiveBytes
from tidekv import budgets, compat
from tidekv.models import FAMILIES
from tidekv.schedules import SCHEDULES, LayerMajor, WholePrompt
from tidekv.selectors import SnapKV

NEW = 12


KEEPING = [name for name, schedule in SCHEDULES.items() if schedule.keeps_all]


@pytest.mark.parametrize("schedule", KEEPING)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_eviction_generates_what_transformers_generates(tiny, prompt, family, schedule):
    model, ids = tiny(family), prompt(60, batch=2)
    plain = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    ours = tidekv.generate(
        model,
        ids,
        schedule=schedule,
        selector=None,
        chunk_size=16,
        max_new_tokens=NEW,
        do_sample=False,
    )
    assert torch.equal(ours, plain)


@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": True, "temperature": 1.5, "top_p": 0.95},
        {"num_beams": 3, "do_sample": False},
        {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
        {"do_sample": True, "num_return_sequences": 4},
    ],
    ids=["sampling", "beams", "beams returned", "samples returned"],
)
def test_decoding_strategies_are_those_of_transformers(tiny, prompt, how):
    model, ids = tiny(), prompt(60)
    torch.manual_seed(1)
    plain = model.generate(ids, max_new_tokens=NEW, **how)
    torch.manual_seed(1)
    ours = tidekv.generate(model, ids, selector=None, max_new_tokens=NEW, **how)
    assert torch.equal(ours, plain)


class Forbid(LogitsProcessor):
    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids, scores):
        scores[:, self.token] = float("-inf")
        return scores


def test_logits_processors_reach_the_first_token(tiny, prompt):
    model, ids = tiny(), prompt(60)
    first = tidekv.prefill(model, ids, budget=40).logits.argmax().item()
    out = tidekv.generate(
        model,
        ids,
        budget=40,
        max_new_tokens=1,
        do_sample=False,
        logits_processor=LogitsProcessorList([Forbid(first)]),
    )
    assert out.shape[1] == 61
    assert out[0, 60].item() != first


def test_streamers_get_the_first_token(smollm2):
    model, tokenizer = smollm2
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    thread = threading.Thread(
        target=tidekv.generate,
        args=(model, ids),
        kwargs={"selector": None, "max_new_tokens": 3, "do_sample": False, "streamer": streamer},
    )
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text.startswith(" Paris")


def test_prefill_reports_what_it_did(tiny, prompt):
    model, ids = tiny(), prompt(64, batch=2)
    done: list[int] = []
    prefilled = tidekv.prefill(model, ids, budget=0.75, on_layer=done.append)
    assert done == [0, 1, 2]
    assert prefilled.prompt_tokens == 64
    assert prefilled.rows == 48
    assert prefilled.cache.rows() == [48] * 3
    assert prefilled.cache.get_seq_length() == 64
    assert prefilled.cache.nbytes() == 3 * 2 * 2 * 2 * 48 * 8 * 4
    assert prefilled.logits.shape == (2, 97)
    assert prefilled.indices is None


def test_a_prefill_is_decoded_from_once(tiny, prompt):
    model, ids = tiny(), prompt(60)
    prefilled = tidekv.prefill(model, ids, budget=40)
    again = copy.deepcopy(prefilled)
    first = tidekv.decode(model, ids, prefilled, max_new_tokens=NEW, do_sample=False)
    with pytest.raises(tidekv.InfeasibleError, match="decoded from already"):
        tidekv.decode(model, ids, prefilled, max_new_tokens=NEW)
    second = tidekv.decode(model, ids, again, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(first, second)


def test_decode_needs_the_same_prompt(tiny, prompt):
    model = tiny()
    prefilled = tidekv.prefill(model, prompt(60), budget=40)
    for other in (prompt(59), prompt(60, batch=2)):
        with pytest.raises(tidekv.InfeasibleError, match="of 1 × 60 tokens but input_ids has"):
            tidekv.decode(model, other, prefilled, max_new_tokens=NEW)


def test_beams_of_one_token_are_a_decoding(tiny, prompt):
    """They leave no token in the cache, but an entry for each of them."""
    model, ids = tiny(), prompt(60)
    prefilled = tidekv.prefill(model, ids, budget=40)
    tidekv.decode(model, ids, prefilled, max_new_tokens=1, num_beams=2, do_sample=False)
    with pytest.raises(tidekv.InfeasibleError, match="decoded from already"):
        tidekv.decode(model, ids, prefilled, max_new_tokens=NEW)


@pytest.mark.parametrize(
    ("family", "schedule"), [("phi3", "layer_major"), ("llama", "whole_prompt")]
)
def test_threads_take_turns_with_a_model(tiny, prompt, family, schedule):
    """These change the model while they run."""
    model, prompts = tiny(family), [prompt(rows) for rows in range(60, 68)]
    options = {"schedule": schedule, "chunk_size": 8, "budget": 40, "max_new_tokens": 4}
    expected = [tidekv.generate(model, ids, **options) for ids in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = pool.map(lambda ids: tidekv.generate(model, ids, **options), prompts)
        assert all(map(torch.equal, found, expected))


def test_model_is_restored_after_an_error_in_generate(tiny, prompt):
    model, ids = tiny(), prompt(60)
    prefilled = tidekv.prefill(model, ids, budget=40)
    with pytest.raises(ValueError, match="no_such_option"):
        tidekv.decode(model, ids, prefilled, no_such_option=1)
    assert "forward" not in model.__dict__
    tidekv.decode(model, ids, prefilled, max_new_tokens=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "token_major"}, "no schedule 'token_major'; use one of whole_prompt, chu"),
        ({"selector": "h3o"}, "no selector 'h3o'; use one of snapkv"),
        ({"cache": "kivy"}, "no cache 'kivy'; use one of full_precision, kivi"),
        ({"schedule": "online", "evict": False}, "online is about evicting; name a selector"),
        ({"schedule": "online", "selector": "h2o"}, "h2o needs every query of the prompt"),
        ({"schedule": "online", "selector": "adakv"}, "adakv keeps unequal numbers of rows"),
        ({"schedule": "online", "selector": "cake"}, "cake decides across layers"),
        ({"schedule": LayerMajor(piece_rows=0)}, "piece_rows must be at least 1 row, not 0"),
        ({"schedule": WholePrompt(mlp_rows=0)}, "mlp_rows must be at least 1 row, not 0"),
        ({"scoring": "sparse"}, "no scoring 'sparse'; use one of blockwise, dense"),
        ({"attention": "paged"}, "no attention 'paged'"),
        ({"attention": "flash_attention_2"}, "needs float16 or bfloat16 on CUDA"),
        ({"chunk_size": 0}, "at least 1 row, not 0"),
        ({"budget": 61}, "outside 1..60"),
        ({"budget": 0}, "outside 1..60"),
        ({"budget": 1.5}, "no share of the prompt"),
        ({"budget": 0.0}, "no share of the prompt"),
        ({"budget": "40"}, "or a share of the prompt \\(a float\\), not '40'"),
        ({"budget": True}, "not True"),
        ({"selector": SnapKV}, "A selector must be made first: write SnapKV\\(\\)"),
        ({"selector": 3}, "A selector is a name or a Selector, not 3"),
        ({"schedule": LayerMajor, "chunk_size": 8}, "A schedule must be made first: write LayerM"),
        ({"cache": tidekv.CompactCache(3)}, "such as the class CompactCache, not as CompactCache"),
        ({"schedule": LayerMajor(device="tpu")}, "There is no device 'tpu' here"),
        ({"budget": 35}, "more than the budget of 35; use a budget of at least 36"),
        ({"selector": SnapKV(window=64), "budget": 60}, "more than the prompt of 60 tokens has"),
        ({"attention_mask": torch.tensor([[0] + [1] * 59])}, "Padded batches"),
        ({"attention_mask": [[1] * 60]}, "attention_mask must be a tensor .*, not a list"),
        ({"chunk_size": 1.5}, "chunk_size of LayerMajor is a whole number, not 1.5"),
        ({"schedule": WholePrompt(mlp_rows="8")}, "mlp_rows .* none or a whole number, not '8'"),
        ({"schedule": LayerMajor(park_caches=1)}, "park_caches of LayerMajor is true or false"),
        ({"cache": lambda layers: DynamicCache()}, "a CompactCache of 3 layers, .* a DynamicCache"),
        ({"cache": lambda layers: tidekv.CompactCache(1)}, "not a CompactCache of 1"),
        ({"cache": lambda: None}, "can't be made for 3 layers: .* takes 0 positional"),
        ({"cache": functools.partial(tidekv.QuantisedCache, groups=8)}, "argument 'groups'"),
        ({"cache": functools.partial(tidekv.QuantisedCache, group="8")}, "group .* not '8'"),
        ({"cache": "kivi"}, "groups of 32 channels, which don't divide a head of 8"),
        (
            {"cache": lambda layers: tidekv.CompactCache(layers), "selector": "adakv"},
            "CompactLayer holds equally many rows in each head",
        ),
    ],
)
def test_infeasible_requests_allocate_nothing(tiny, prompt, options, message):
    model, ids = tiny(), prompt(60)
    with LiveBytes(model, ids) as live, pytest.raises(tidekv.InfeasibleError, match=message):
        tidekv.prefill(model, ids, **({"budget": 40} | options))
    assert live.peak <= 64  # comparing a mask given makes a mask of bools


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        *((torch.zeros(shape, dtype=torch.int64), "not \\(") for shape in ((60,), (1, 0), (0, 60))),
        (torch.zeros(1, 60), "int64 or int32, not torch.float32"),
        ([[3] * 60], "a tensor of token ids, not a list"),
        ({"input_ids": torch.zeros(1, 60)}, "has it as .input_ids"),
    ],
)
def test_input_ids_must_be_a_batch_of_prompts(tiny, ids, message):
    with pytest.raises(tidekv.InfeasibleError, match=f"input_ids must be .*{message}"):
        tidekv.prefill(tiny(), ids)


@pytest.mark.parametrize("token", [97, -1])
def test_token_ids_are_of_the_models_vocabulary(tiny, prompt, token):
    model, ids = tiny(), prompt(60, batch=2)
    ids[1, 7] = token
    with (
        LiveBytes(model, ids) as live,
        pytest.raises(tidekv.InfeasibleError, match=f"must be in 0..96, .* not {token}; use the m"),
    ):
        tidekv.prefill(model, ids, budget=40)
    assert live.peak <= 16  # the smallest and the largest


def test_decode_takes_what_prefill_returned(tiny, prompt):
    model, ids = tiny(), prompt(60)
    prefilled = tidekv.prefill(model, ids, budget=40)
    with pytest.raises(tidekv.InfeasibleError, match="returned, not from a CompactCache"):
        tidekv.decode(model, ids, prefilled.cache, max_new_tokens=2)


def test_the_model_must_be_a_causal_language_model(tiny, prompt):
    for other in (tiny().model, torch.nn.Linear(2, 2), (tiny(), None), None):
        with pytest.raises(tidekv.InfeasibleError, match="is no causal language model"):
            tidekv.prefill(other, prompt(60))


def test_sliding_windows_shorter_than_the_prompt_are_refused(tiny, prompt):
    sliding = [
        tiny("mistral", sliding_window=32),
        tiny("qwen2", sliding_window=32, use_sliding_window=True, max_window_layers=1),
    ]
    for model in sliding:
        with pytest.raises(tidekv.InfeasibleError, match="sliding window of 32 tokens"):
            tidekv.prefill(model, prompt(33), selector=None)
        ids = prompt(32)
        with torch.no_grad():
            expected = model(ids).logits[:, -1]
        logits = tidekv.prefill(model, ids, selector=None, chunk_size=8).logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


SLIDING = [
    ("mistral", {"sliding_window": 64}),
    ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}),
    ("gemma2", {"sliding_window": 64}),
]


@pytest.mark.parametrize(("family", "config"), SLIDING)
@pytest.mark.parametrize("options", [{"selector": None}, {"cache": "kivi", "selector": None}])
def test_every_row_is_decoded_past_a_sliding_window(tiny, prompt, family, config, options):
    """Nothing is wrong with masks while no row is missing: here the answer outgrows the window."""
    model, ids = tiny(family, **config), prompt(60)
    if "cache" in options:
        options = {**options, "cache": functools.partial(tidekv.QuantisedCache, group=8)}
    ways = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    plain = model.generate(ids, **ways)
    assert torch.equal(tidekv.generate(model, ids, **options, **ways), plain)


@pytest.mark.parametrize(("family", "config"), SLIDING)
@pytest.mark.parametrize("selector", ["snapkv", "adakv"])
def test_fewer_rows_are_not_decoded_past_a_sliding_window(tiny, prompt, family, config, selector):
    """transformers would see kept rows at the end of the prompt, and forget them too late."""
    model, ids = tiny(family, **config), prompt(60)
    options = {"selector": selector, "budget": 40}
    ways = {"do_sample": False, "eos_token_id": None}
    refused = pytest.raises(tidekv.InfeasibleError, match="sliding window of 64 tokens, which")
    with LiveBytes(model, ids) as live, refused:
        tidekv.generate(model, ids, max_new_tokens=6, **options, **ways)
    with refused:
        tidekv.generate(model, ids, max_length=66, **options, **ways)
    assert live.peak == 0
    # The last token isn't read, so it may lie behind the window.
    assert tidekv.generate(model, ids, max_new_tokens=5, **options, **ways).shape == (1, 65)
    prefilled = tidekv.prefill(model, ids, **options)
    with refused:
        tidekv.decode(model, ids, prefilled, max_new_tokens=6, **ways)
    cache = {compat.cache_argument(model): prefilled.cache}
    more = torch.cat((ids, ids[:, :1]), dim=1)
    with refused:  # transformers' own, which asks nobody before
        model.generate(more, max_new_tokens=6, **cache, **ways)
    assert prefilled.cache.get_seq_length() == 64


def test_every_row_in_unequal_heads_counts_as_fewer(tiny, prompt):
    """adakv with every row: one column of the mask stands for them all the same."""
    model, ids = tiny("mistral", sliding_window=64), prompt(60)
    with pytest.raises(tidekv.InfeasibleError, match="sliding window of 64 tokens, which"):
        tidekv.generate(model, ids, selector="adakv", budget=60, max_new_tokens=6)
    tidekv.generate(model, ids, selector="snapkv", budget=60, max_new_tokens=6)


def test_other_families_are_refused(tiny):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=4))
    with pytest.raises(tidekv.InfeasibleError, match="family 'gpt2' are not supported"):
        tidekv.prefill(model, torch.ones(1, 60, dtype=torch.int64))


def test_padding_tokens_inside_the_prompt_are_tokens(tiny, prompt, monkeypatch):
    """Without a mask, generate would take them for padding."""
    model, ids = tiny(), prompt(60)
    ids[0, ::7] = model.config.pad_token_id
    mask = torch.ones_like(ids)
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(tidekv.generate(model, ids, selector=None, **options), plain)
    masked = tidekv.generate(model, ids, selector=None, attention_mask=mask, **options)
    assert torch.equal(masked, plain)


def test_a_forward_that_others_put_in_place_stays(tiny, prompt):
    model, ids = tiny(), prompt(40)
    plain = model.forward
    calls = []

    def forward(*args, **kwargs):
        calls.append(kwargs["input_ids"].shape)
        return plain(*args, **kwargs)

    model.forward = forward
    try:
        tidekv.generate(model, ids, budget=36, selector=SnapKV(window=8), max_new_tokens=4)
        assert model.forward is forward
        assert len(calls) == 3  # the first token's forward is replayed
    finally:
        del model.forward


@pytest.mark.parametrize(
    ("limits", "new"),
    [
        ({"max_length": 46}, 6),
        ({"max_new_tokens": 5}, 5),
        ({"generation_config": GenerationConfig(max_new_tokens=7)}, 7),
        ({}, 128),
    ],
)
def test_length_limits_are_the_users(tiny, prompt, limits, new):
    output = tidekv.generate(
        tiny(), prompt(40), selector=None, do_sample=False, eos_token_id=None, **limits
    )
    assert output.shape[1] == 40 + new


def test_what_would_change_the_answer_in_silence_is_refused(tiny, prompt):
    model, ids = tiny(), prompt(40)
    with pytest.raises(tidekv.InfeasibleError, match="use_cache can't be False"):
        tidekv.generate(model, ids, selector=None, use_cache=False)
    with pytest.raises(tidekv.InfeasibleError, match="Padded batches are not supported"):
        tidekv.generate(model, ids, selector=None, attention_mask=torch.ones(1, 5))
    model.train()
    try:
        with pytest.raises(tidekv.InfeasibleError, match="in training mode"):
            tidekv.prefill(model, ids, selector=None)
    finally:
        model.eval()


@pytest.mark.parametrize("share", range(1, 100))
def test_a_share_of_a_hundred_is_its_percentage(share):
    assert budgets.rows(share / 100, 100) == share
