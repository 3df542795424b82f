"""Which kernel serves ``scaled_dot_product_attention`` on a card, as PyTorch chooses it there.

PyTorch's own choice is made in C++ for the device of the tensors, which a build for the CPU doesn't
know. The rules are those of ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``, and what is
done around the kernels is that of ``attention.cpp`` beside it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memtrace.allocator.settings import parse_version

_aten = torch.ops.aten
#: Whether memory-efficient attention takes fewer heads of keys than of queries, from torch 2.14 on.
_GROUPED = parse_version(torch.__version__) >= (2, 14)
_plain = F.scaled_dot_product_attention


def install() -> None:
    """Have PyTorch ask here."""
    F.scaled_dot_product_attention = attend
    torch._C._nn.scaled_dot_product_attention = attend


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As :func:`torch.nn.functional.scaled_dot_product_attention`."""
    if not query.is_cuda:
        return _plain(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    size = query.shape[-1]
    mask = _additive(attn_mask, query.dtype)
    if flash(query, key, value, mask, is_causal):
        padded = [_padded(one, 8) for one in (query, key, value)]
        out = _aten._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, False, scale=scale or size**-0.5
        )[0]
        return out if out.shape[-1] == value.shape[-1] else out[..., : value.shape[-1]]
    if efficient(query, key, value, mask):
        grows = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
        return _aten._scaled_dot_product_efficient_attention(
            query, key, value, _aligned(mask), grows, dropout_p, is_causal, scale=scale
        )[0]
    if not torch.backends.cuda.math_sdp_enabled():
        raise RuntimeError("No available kernel. Aborting execution.")
    return _aten._scaled_dot_product_attention_math(
        query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


def flash(query: Any, key: Any, value: Any, mask: Any, is_causal: bool) -> bool:
    """Whether FlashAttention serves these tensors."""
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and query.dim() == 4
        and query.dtype in (torch.float16, torch.bfloat16)
        and mask is None
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
        and not (is_causal and query.shape[-2] != key.shape[-2])
        and all(one.stride(-1) == 1 for one in (query, key, value))
    )


def efficient(query: Any, key: Any, value: Any, mask: Any) -> bool:
    """Whether memory-efficient attention serves these tensors."""
    align = 4 if query.dtype == torch.float32 else 8
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and query.dim() == 4
        and query.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and (
            query.dtype != torch.bfloat16
            or torch.cuda.get_device_capability(query.device) >= (8, 0)
        )
        and (_GROUPED or query.shape[1] == key.shape[1])
        and query.shape[-1] % align == 0
        and value.shape[-1] % align == 0
        and all(one.stride(-1) == 1 for one in (query, key, value, mask) if one is not None)
    )


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask of booleans as what is added to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    missing = -tensor.shape[-1] % multiple
    return tensor if missing == 0 else F.pad(tensor, (0, missing))


def _aligned(mask: Tensor | None) -> Tensor | None:
    """The rows of a bias begin at multiples of 8 elements (ATen's ``preprocess_mask``)."""
    if mask is None or not any(stride % 8 for stride in mask.stride()[:-1]):
        return mask
    columns = mask.shape[-1]
    return F.pad(mask, (0, 8 - columns % 8))[..., :columns]
