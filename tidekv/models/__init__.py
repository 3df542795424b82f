"""The one place that knows how a model family computes its layers.

:class:`~tidekv.models.stock.StockDecoder` runs any family through the model's own forward, one
layer at a time. :class:`~tidekv.models.tight.TightDecoder` takes the steps of a layer apart for
the families whose layer is pre-norm, rotary attention and a gated MLP, and so keeps less alive;
:class:`~tidekv.models.published.PublishedDecoder` keeps what TideKV's authors keep.
"""

from typing import Any

import torch

from tidekv.errors import InfeasibleError
from tidekv.models.published import PublishedDecoder
from tidekv.models.stock import Span, StockDecoder
from tidekv.models.tight import HEAD_NORM, TightDecoder

#: ``config.model_type`` of the families that the tests cover.
FAMILIES = (
    *HEAD_NORM,
    "gemma",
    "gemma2",
    "gpt_neox",
    "granite",
    "olmo2",
    "phi3",
    "smollm3",
)

__all__ = [
    "FAMILIES",
    "PublishedDecoder",
    "Span",
    "StockDecoder",
    "TightDecoder",
    "check_family",
    "decoder_of",
]


def check_family(model: Any) -> None:
    """
    Raises:
        InfeasibleError: it is no causal language model of one of :data:`FAMILIES`.
    """
    family = getattr(getattr(model, "config", None), "model_type", None)
    if family is not None and family not in FAMILIES:
        raise InfeasibleError(
            f"Models of the family {family!r} are not supported; use one of {', '.join(FAMILIES)}."
        )
    if family is None or model.get_output_embeddings() is None:
        raise InfeasibleError(
            f"A {type(model).__name__} is no causal language model of transformers; load one with "
            "AutoModelForCausalLM, or with tidekv.load_model, which returns (model, tokenizer)."
        )


def decoder_of(model: Any, device: torch.device | None = None) -> StockDecoder:
    """What a schedule drives of a model that :func:`check_family` lets pass.

    Args:
        device: where the prompt is computed; None: where the model's layers are.
    """
    tight = model.config.model_type in HEAD_NORM
    return (TightDecoder if tight else StockDecoder)(model, device)
