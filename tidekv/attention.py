"""Causal attention of a prompt chunk to everything before it and to itself.

One function, :func:`decide`, says which kernel serves a model. FlashAttention aligns the causal
mask to the bottom right and groups heads by itself. The other fused kernels do neither, so for them
``sdpa`` splits the keys into the prefix (seen by every row: no mask) and the chunk (causal), runs
the kernel on each and merges the two by their log-sum-exp (Dao et al. 2022, section 3.1). Either
way there is no (C, S) mask, and the K/V heads of the prefix are not expanded.

Shapes: B batch, Hq query heads, Hkv KV heads, G = Hq / Hkv, C chunk rows, P rows up to the chunk's
end, D head size.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from memtrace import scopes
from tidekv.errors import InfeasibleError, check_choice
from tidekv.names import ATTENTIONS

#: One softmax over some of the keys: output (B, H, L, D) and log-sum-exp (B, H, L) in fp32.
Partial = tuple[torch.Tensor, torch.Tensor]

#: Of all names, those of one kernel of PyTorch's scaled_dot_product_attention.
_KERNELS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_math": SDPBackend.MATH,
}
#: Those that align a causal mask to the bottom right by themselves.
FLASH = ("flash_attention_2", "sdpa_flash")
#: The compute capability from which on there are FlashAttention, and kernels for bfloat16.
_AMPERE = (8, 0)


@dataclass(frozen=True)
class Backend:
    """What computes the attention of one prefill.

    Attributes:
        name: what was asked for, one of :data:`tidekv.names.ATTENTIONS`.
        kernel: what was taken for it, in words.
        attend: (queries (B, Hq, C, D), rows P-C..P-1; keys and values (B, Hkv, P, D); scaling) →
            (B, Hq, C, D).
    """

    name: str
    kernel: str
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def decide(
    attention: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    head_dim: int,
    softcap: float | None = None,
) -> Backend:
    """The kernel for one of :data:`tidekv.names.ATTENTIONS`.

    Args:
        softcap: c of logits ← c·tanh(logits / c); no fused kernel of PyTorch knows it.

    Raises:
        InfeasibleError: no such backend, or it can't serve this dtype, device or model.
    """
    check_choice("attention", attention, ATTENTIONS)
    if attention == "eager":
        return Backend(attention, "plain operators, dense", _Eager(softcap))
    on_gpu = device.type in ("cuda", "meta")
    half = dtype in (torch.float16, torch.bfloat16)
    capability = _AMPERE  # unless the device is there to be asked
    if device.type == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
    if attention in FLASH and not (half and on_gpu):
        raise InfeasibleError(
            f"{attention} needs float16 or bfloat16 on CUDA, not "
            f"{str(dtype).removeprefix('torch.')} on {device.type}; use attention='sdpa'."
        )
    if attention in FLASH and capability < _AMPERE:
        raise InfeasibleError(
            f"{attention} needs compute capability 8.0, and this device has "
            f"{'.'.join(map(str, capability))}; use attention='sdpa'."
        )
    if attention == "flash_attention_2" and has_flash_package():
        return Backend(attention, "the flash-attn package", _FlashPackage(softcap))
    if softcap is not None:
        if attention != "sdpa":
            raise InfeasibleError(
                "Attention with a soft cap needs the flash-attn package for flash_attention_2; "
                "install it, or use attention='sdpa'."
            )
        return Backend(attention, "plain operators (soft cap)", _Split(_Maths(softcap)))
    if attention == "sdpa_math":
        return Backend(attention, "PyTorch's attention in plain operators, dense", _dense)
    if attention in ("sdpa", *FLASH):
        if on_gpu and half and head_dim % 8 == 0 and head_dim <= 256 and capability >= _AMPERE:
            return Backend(attention, "PyTorch's FlashAttention", _flash)
        if attention in FLASH:
            raise InfeasibleError(
                f"FlashAttention serves no heads of {head_dim}; use attention='sdpa'."
            )
    served = dtype in (torch.float16, torch.float32) or (
        dtype == torch.bfloat16 and capability >= _AMPERE
    )
    if on_gpu and served and head_dim % (8 if half else 4) == 0:
        return Backend(attention, "PyTorch's memory-efficient attention", _Split(_efficient))
    if attention == "sdpa_efficient":
        raise InfeasibleError(
            f"Memory-efficient attention serves no heads of {head_dim} in "
            f"{str(dtype).removeprefix('torch.')} on this {device.type}; use attention='sdpa'."
        )
    if device.type == "cpu":
        return Backend(attention, "PyTorch's FlashAttention for the CPU", _Split(_flash_cpu))
    return Backend(attention, "plain operators", _Split(_Maths(None)))


def has_flash_package() -> bool:
    """Whether the ``flash_attn`` package is installed; PyTorch's own kernel serves otherwise."""
    return find_spec("flash_attn") is not None


def transformers_name(attention: str) -> str:
    """What transformers' own code runs: it insists on the package for flash_attention_2."""
    if attention in _KERNELS or (attention == "flash_attention_2" and not has_flash_package()):
        return "sdpa"
    return attention


def pinned(attention: str) -> AbstractContextManager[None]:
    """Have PyTorch's attention take the kernel that was asked for, if one was."""
    if attention == "flash_attention_2":
        attention = "sdpa_flash"
    kernel = _KERNELS.get(attention)
    pin: AbstractContextManager[None] = nullcontext() if kernel is None else sdpa_kernel(kernel)
    return pin


def by_transformers(backend: Backend, module: Any, mask: torch.Tensor) -> Backend:
    """The same attention by transformers' own function for it, with a mask in full.

    Each of them expands K and V to the query heads, (B, Hq, P, D) each; ``eager`` holds the scores
    (B, Hq, C, P) scaled and masked, in fp32 while it takes the softmax, and as weights.

    Args:
        module: the attention module that calls it.
        mask: additive, (C, P).

    Raises:
        InfeasibleError: transformers' code for ``sdpa`` knows no soft cap.
    """
    softcap = getattr(module, "attn_logit_softcapping", None)
    given = {} if softcap is None else {"softcap": softcap}
    if backend.name == "eager":
        forward = sys.modules[type(module).__module__].eager_attention_forward
    elif softcap is None:
        forward = sdpa_attention_forward
    else:
        raise InfeasibleError(
            "transformers' attention sdpa knows no soft cap; use attention='eager'."
        )

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        with pinned(backend.name):
            out, _ = forward(module, q, k, v, mask[None, None], scaling=scaling, **given)
        heads: torch.Tensor = out.transpose(1, 2)
        return heads

    return replace(backend, attend=attend)


_Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], Partial]


class _Split:
    """Prefix and chunk apart, for kernels whose causal mask is aligned to the top left."""

    def __init__(self, kernel: _Kernel) -> None:
        self._kernel = kernel

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        rows, prefix = q.shape[2], k.shape[2] - q.shape[2]
        if rows == 1:  # sees every key
            return self._all_keys(q, k, v, scaling)[0]
        chunk = self._causal(q, k[:, :, prefix:], v[:, :, prefix:], scaling)
        if prefix == 0:
            return chunk[0]
        return _merge(self._all_keys(q, k[:, :, :prefix], v[:, :, :prefix], scaling), chunk)

    def _all_keys(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> Partial:
        """Every row sees every key. The G query heads of a KV head become rows of one head."""
        batch, heads, rows, dim = q.shape
        folded = q.reshape(batch, k.shape[1], -1, dim)
        out, lse = self._kernel(folded, k, v, False, scaling)
        return out.reshape(batch, heads, rows, dim), lse.reshape(batch, heads, rows)

    def _causal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> Partial:
        """A chunk against itself. Its K/V, C rows only, are expanded to the query heads."""
        group = q.shape[1] // k.shape[1]
        if group > 1:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        return self._kernel(q, k, v, True, scaling)


def _merge(a: Partial, b: Partial) -> torch.Tensor:
    """The softmax over the keys of both: outputs weighted by share of the exp-sum, in fp32."""
    total = torch.logaddexp(a[1], b[1])
    merged = a[0] * (a[1] - total).exp_().unsqueeze(-1)
    merged.addcmul_(b[0], (b[1] - total).exp_().unsqueeze(-1))
    return merged.to(a[0].dtype)


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
    """Of this operator, ``is_causal`` means the bottom right, as ``causal_lower_right`` uses it."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, True, False, scale=scaling
    )
    scopes.retag(lse, "backend")
    return out


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
    mask = causal_mask(q, q.shape[2], k.shape[2])
    with pinned("sdpa_math"):
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scaling, enable_gqa=q.shape[1] > k.shape[1]
        )


def _flash_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scaling: float
) -> Partial:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, scale=scaling
    )
    scopes.retag(lse, "backend")
    return out, lse


def _efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scaling: float
) -> Partial:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal, scale=scaling
    )
    scopes.retag(lse, "backend")
    return out, lse[:, :, : q.shape[2]]  # the kernel pads the rows to a multiple of 32


class _Maths:
    """Plain operators, where no fused kernel that returns the log-sum-exp serves."""

    def __init__(self, softcap: float | None) -> None:
        self._softcap = softcap

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scaling: float
    ) -> Partial:
        dtype = torch.promote_types(q.dtype, torch.float32)
        logits = capped((q @ k.transpose(-1, -2)).to(dtype) * scaling, self._softcap)
        if causal:
            logits += causal_mask(logits, *logits.shape[-2:])
        lse = logits.logsumexp(-1)
        weights = (logits - lse.unsqueeze(-1)).exp_()
        return weights.to(v.dtype) @ v, lse


def capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """c·tanh(logits / c), in place; the logits themselves without a soft cap."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def causal_mask(like: torch.Tensor, rows: int, keys: int) -> torch.Tensor:
    """(C, P), 0 where row i may see key j ≤ i + P - C, -inf elsewhere (bottom-right aligned)."""
    with scopes.component("backend"):
        mask = like.new_full((rows, keys), float("-inf"))
        return mask.triu_(diagonal=keys - rows + 1)


class _Eager:
    """The reference: expanded heads, full mask, fp32 softmax."""

    def __init__(self, softcap: float | None) -> None:
        self._softcap = softcap

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        logits = q @ k.repeat_interleave(group, dim=1).transpose(-1, -2) * scaling
        logits = capped(logits, self._softcap)
        logits += causal_mask(logits, *logits.shape[-2:])
        weights = logits.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        return weights @ v.repeat_interleave(group, dim=1)


class _FlashPackage:
    """flash-attn ≥ 2.1 aligns ``causal`` to the bottom right and groups heads by itself."""

    def __init__(self, softcap: float | None) -> None:
        self._softcap = softcap or 0.0

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        from flash_attn import flash_attn_func

        out: torch.Tensor = flash_attn_func(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            softmax_scale=scaling,
            causal=True,
            softcap=self._softcap,
        )
        return out.transpose(1, 2)
