"""transformers' ``generate`` ends on the virtual GPU as it does on the CPU.

The tests run within a process on a virtual GPU; see ``test_values.py``.
"""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import LlamaConfig, LlamaForCausalLM

from memtrace.virtual_gpu import values
from tests.virtual_gpu.values import unread

EOS = 2
NEW = 9


def make_llama(device: str, kv_heads: int = 2) -> Any:
    """A random model, its weights drawn on the device, where they are unknown.

    With fewer heads of keys than of queries (4) attention in float32 takes plain operators up to
    torch 2.13.
    """
    config = LlamaConfig(
        vocab_size=2000,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=EOS,
    )
    with torch.device(device):
        return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def llamas():
    """``llamas[device]``: a model, its draft model and the list of its forward calls' tokens."""
    made = {}
    for device in ("cpu", "cuda"):
        model, draft, calls = make_llama(device), make_llama(device), []
        model.register_forward_hook(lambda *call, calls=calls: calls.append(call[2].logits.shape))
        made[device] = model, draft, calls
    # On the CPU a draft is accepted if it comes from the same model.
    made["cpu"][1].load_state_dict(made["cpu"][0].state_dict())
    made["cpu"][1].generation_config.assistant_confidence_threshold = 0.0
    return made


def prompt(rows: int, device: str) -> torch.Tensor:
    return torch.arange(3, 3 + 7 * rows).view(rows, 7).to(device)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 50, "top_p": 0.9, "temperature": 0.7},
    "min-p": {"do_sample": True, "top_k": 0, "min_p": 0.1, "typical_p": 0.9},
    "penalties": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
    "beams": {"num_beams": 3},
    "many beams": {"num_beams": 4, "num_return_sequences": 2, "early_stopping": True},
    "patient beams": {"num_beams": 2, "early_stopping": "never", "length_penalty": 2.0},
    "sampled beams": {"num_beams": 3, "do_sample": True},
    "left-padded": {"padded": True},
    "left-padded beams": {"padded": True, "num_beams": 2},
    "static cache": {"cache_implementation": "static"},
    "assisted": {"assisted": True},
}


def generate(llama: Any, device: str, **options: Any) -> tuple[torch.Size, list[torch.Size]]:
    """Shape of what was generated, and of the logits of each forward call."""
    model, draft, calls = llama
    calls.clear()
    ids = prompt(2, device)
    if options.pop("padded", False):
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        options["attention_mask"] = mask
    if options.pop("assisted", False):
        ids = prompt(1, device)
        options["assistant_model"] = draft
    if device == "cpu":  # the placeholder never is an end of sequence; no random token may be
        options["suppress_tokens"] = [EOS]
    return model.generate(ids, max_new_tokens=NEW, **options).shape, list(calls)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("way", WAYS)
def test_generation_ends_as_on_the_cpu(llamas, way, context):
    before = unread()
    with context():
        on_device = generate(llamas["cuda"], "cuda", **WAYS[way])
        assert on_device == generate(llamas["cpu"], "cpu", **WAYS[way])
    assert on_device[0][1] == 7 + NEW
    assert unread() == before


def test_what_was_chosen_in_place_of_tokens_is_counted(llamas):
    def choices() -> int:
        return values.summary()["placeholder"]["token choices"]

    before = choices()
    generate(llamas["cuda"], "cuda")
    assert choices() - before == NEW


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_mask_of_ones_costs_what_no_mask_costs(context, attention):
    model = make_llama("cuda")
    model.set_attn_implementation(attention)
    ids = torch.arange(3, 1003).view(1, 1000).cuda()
    mask = torch.ones_like(ids)

    def peak(**options: Any) -> int:
        torch.cuda.reset_peak_memory_stats()
        with context():
            model(ids, logits_to_keep=1, **options)
        return torch.cuda.max_memory_allocated()

    peak()  # cuBLAS takes its workspace once
    assert peak(attention_mask=mask) == peak()


def test_padding_costs_what_the_mask_takes():
    model = make_llama("cuda", kv_heads=4)
    ids = torch.arange(3, 1003).view(1, 1000).cuda()
    mask = torch.ones_like(ids)
    mask[0, 0] = 0

    def peak(**options: Any) -> int:
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            model(ids, logits_to_keep=1, **options)
        return torch.cuda.max_memory_allocated()

    peak()
    assert peak(attention_mask=mask) - peak() >= 1000 * 1000


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_forward_allocates_as_without(context, attention):
    model = make_llama("cuda", kv_heads=4)
    model.set_attn_implementation(attention)
    ids = torch.arange(3, 503).view(2, 250).cuda()

    def figures() -> dict[str, int]:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
        with context():
            cache = model(ids, logits_to_keep=1).past_key_values
            for _ in range(3):
                model(ids[:, :1], past_key_values=cache)
        del cache
        return torch.cuda.memory_stats()

    figures()  # cuBLAS takes its workspace once
    followed = figures()
    with _disable_current_modes():
        plain = figures()
    assert followed == plain
