"""The one place that knows how a model family computes its layers.

:class:`~tidekv.models.stock.StockDecoder` runs any family through the model's own forward, one
layer at a time. :class:`~tidekv.models.tight.TightDecoder` takes the steps of a layer apart for
the families whose layer is pre-norm, rotary attention and a gated MLP, and so keeps less alive.
"""

from typing import Any

import torch

from tidekv.errors import InfeasibleError
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

__all__ = ["FAMILIES", "Span", "StockDecoder", "TightDecoder", "decoder_of"]


def decoder_of(model: Any, device: torch.device | None = None) -> StockDecoder:
    """
    Args:
        device: where the prompt is computed; None: where the model's layers are.

    Raises:
        InfeasibleError: the model's family is not one of :data:`FAMILIES`.
    """
    family = model.config.model_type
    if family not in FAMILIES:
        raise InfeasibleError(
            f"Models of the family {family!r} are not supported; use one of {', '.join(FAMILIES)}."
        )
    return (TightDecoder if family in HEAD_NORM else StockDecoder)(model, device)
