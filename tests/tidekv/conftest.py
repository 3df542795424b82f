"""Models that the tests share."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from tidekv.errors import LoadError
from tidekv.loading import encode, load_model, smollm2_folder

#: Whether transformers checks configurations, and runs models on meta tensors.
TRANSFORMERS_5 = int(transformers.__version__.partition(".")[0]) >= 5
DEMO_PROMPT = Path(__file__).parents[2] / "traces" / "demo-prompt.txt"


def make_tiny(family: str, **overrides: Any) -> Any:
    """A random 3-layer model: 4 query heads on 2 KV heads of 8."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "sliding_window": None,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    if family == "gpt_neox":  # as many KV heads as query heads
        del settings["num_key_value_heads"], settings["head_dim"]
    if family == "gemma2":  # every other layer slides, and there is no sdpa for its soft cap
        settings["sliding_window"] = 512
    config = AutoConfig.for_model(family, **(settings | overrides))
    attention = "eager" if family == "gemma2" else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    # Weights as drawn leave attention nearly uniform, so that little depends on the positions.
    for name, weight in model.named_parameters():
        if re.search(r"(q_proj|k_proj|qkv_proj|query_key_value)\.weight", name):
            weight.data *= 8
    return model


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Any]:
    """``tiny(family, **config)``: models by their settings, made once."""
    made: dict[Any, Any] = {}

    def get(family: str = "llama", **overrides: Any) -> Any:
        key = (family, *itertools.chain(*sorted(overrides.items(), key=str)))
        if str(key) not in made:
            made[str(key)] = make_tiny(family, **overrides)
        return made[str(key)]

    return get


@pytest.fixture
def prompt() -> Callable[..., torch.Tensor]:
    """``prompt(rows, batch=1)``: random token ids."""

    def make(rows: int, batch: int = 1) -> torch.Tensor:
        return torch.randint(3, 97, (batch, rows), generator=torch.Generator().manual_seed(rows))

    return make


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in float32 and its tokenizer."""
    try:
        smollm2_folder()
    except LoadError as error:
        pytest.skip(str(error))
    return load_model("smollm2")


@pytest.fixture(scope="session")
def demo_ids(smollm2: tuple[Any, Any]) -> torch.Tensor:
    """The demo prompt in SmolLM2's chat template, (1, S)."""
    return encode(smollm2[1], DEMO_PROMPT.read_text(encoding="utf-8"))
