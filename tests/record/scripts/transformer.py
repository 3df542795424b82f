"""A random model of one family on one device, run as a user would who never heard of memtrace.

python transformer.py FAMILY DEVICE [no_grad|inference_mode] [eager|sdpa] [forward|generate]
"""

import sys

import torch
import transformers

LAYERS, HIDDEN, HEADS, KV_HEADS, VOCABULARY = 4, 256, 8, 2, 4096
PROMPT, NEW = 384, 4

_COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": 4 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_GROUPED = _COMMON | {"num_key_value_heads": KV_HEADS, "head_dim": HIDDEN // HEADS}
_GEMMA = _GROUPED | {"sliding_window": 128}
_ENCODER_DECODER = {
    "d_model": HIDDEN,
    "d_kv": HIDDEN // HEADS,
    "d_ff": 4 * HIDDEN,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "vocab_size": VOCABULARY,
    "decoder_start_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
}

#: By family: the model's class, its configuration's class, and the configuration.
FAMILIES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", _GROUPED | {"sliding_window": 128}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _COMMON),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", _GROUPED),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", _GEMMA),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", _GEMMA),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _COMMON | {"n_inner": 4 * HIDDEN}),
    "t5": ("T5ForConditionalGeneration", "T5Config", _ENCODER_DECODER),
    "mamba": ("MambaForCausalLM", "MambaConfig", _COMMON | {"state_size": 16}),
}


def model(family: str, device: str, attention: str = "sdpa") -> transformers.PreTrainedModel:
    """A model of the family with random weights."""
    model_class, config_class, options = FAMILIES[family]
    config = getattr(transformers, config_class)(**options)
    if family != "mamba":  # it has no attention
        config._attn_implementation = "eager" if family == "t5" else attention
    torch.manual_seed(0)
    return getattr(transformers, model_class)(config).eval().to(device)


def run(family: str, device: str, grad: str, attention: str, how: str) -> object:
    """Make the model and run it over a prompt; what it returns is what stays alive."""
    found = model(family, device, attention)
    prompt = torch.arange(2, 2 + PROMPT, device=device)[None] % VOCABULARY
    with getattr(torch, grad)():
        if how == "generate":
            out = found.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=NEW,
                do_sample=True,
                top_k=50,
                top_p=0.9,
                return_dict_in_generate=True,
            )
        elif family == "t5":
            out = found(input_ids=prompt, decoder_input_ids=prompt[:, :8], use_cache=True)
        else:
            out = found(prompt, use_cache=True)
    return found, out


if __name__ == "__main__":
    words = dict(enumerate(sys.argv[1:]))
    run(
        words[0],
        words[1],
        words.get(2, "no_grad"),
        words.get(3, "sdpa"),
        words.get(4, "generate"),
    )
