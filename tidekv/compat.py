"""What differs between the transformers releases that are supported (4.57 to 5.24)."""

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast


@lru_cache(maxsize=8)
def _parameters(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def cache_argument(model: torch.nn.Module) -> str:
    """The name under which ``forward`` and ``generate`` take a cache.

    ``past_key_values`` until 5.23, ``cache`` from 5.24 on.
    """
    known = _parameters(type(model).forward)
    return "cache" if "cache" in known else "past_key_values"


def layer_cache_argument(attention: torch.nn.Module) -> str:
    """The name under which an attention module takes the cache."""
    known = inspect.signature(type(attention).forward).parameters
    return next(name for name in ("cache", "past_key_values", "layer_past") if name in known)


def output_with_cache(logits: torch.Tensor, cache: Any) -> CausalLMOutputWithPast:
    """What a causal model's ``forward`` returns; the field is named like the argument."""
    fields = CausalLMOutputWithPast.__dataclass_fields__
    name = "cache" if "cache" in fields else "past_key_values"
    return CausalLMOutputWithPast(logits=logits, **{name: cache})


def new_rows(query: Any) -> int:
    """Rows about to be added, from the argument of ``get_mask_sizes``.

    The positions (a tensor) until 5.2, their number (an int) from 5.3 on.
    """
    return query if isinstance(query, int) else int(query.shape[0])


def sliding_window(config: Any) -> int | None:
    """The smallest attention window of any layer in tokens, or None where all layers see all.

    From 4.54 on ``layer_types`` says which layers slide; Mistral has no such list and slides in
    every layer once ``sliding_window`` is set.
    """
    window: int | None = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        return window if "sliding_attention" in layer_types else None
    return window
