"""Causal attention of a prompt chunk to everything before it and to itself.

``sdpa`` splits the keys into the prefix (seen by every row: no mask) and the chunk (causal), runs
one fused kernel on each and merges the two by their log-sum-exp (Dao et al. 2022, section 3.1).
So there is no (C, S) mask, and the K/V heads of the prefix are not expanded: the query heads of a
group are folded into the rows instead.

Shapes: B batch, Hq query heads, Hkv KV heads, G = Hq / Hkv, C chunk rows, P rows up to the chunk's
end, D head size.
"""

from collections.abc import Callable
from importlib.util import find_spec

import torch

from memtrace import scopes
from tidekv.errors import InfeasibleError, check_choice

#: One softmax over some of the keys: output (B, H, L, D) and log-sum-exp (B, H, L) in fp32.
Partial = tuple[torch.Tensor, torch.Tensor]

ATTENTIONS = ("sdpa", "eager", "flash_attention_2")


def check(attention: str, dtype: torch.dtype, device: torch.device) -> None:
    """
    Raises:
        InfeasibleError: no such backend, or it can't serve this dtype and device.
    """
    check_choice("attention", attention, ATTENTIONS)
    served = dtype in (torch.float16, torch.bfloat16) and device.type in ("cuda", "meta")
    if attention == "flash_attention_2" and not served:
        raise InfeasibleError(
            f"flash_attention_2 needs float16 or bfloat16 on CUDA, not "
            f"{str(dtype).removeprefix('torch.')} on {device.type}; use attention='sdpa'."
        )


def has_flash_package() -> bool:
    """Whether the ``flash_attn`` package is installed; PyTorch's own kernel serves otherwise."""
    return find_spec("flash_attn") is not None


def transformers_name(attention: str) -> str:
    """What transformers' own code runs: it insists on the package for flash_attention_2."""
    if attention == "flash_attention_2" and not has_flash_package():
        return "sdpa"
    return attention


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scaling: float,
    attention: str = "sdpa",
) -> torch.Tensor:
    """Attention output (B, Hq, C, D) of the last C of P rows.

    Args:
        queries: (B, Hq, C, D), rows P-C..P-1.
        keys, values: (B, Hkv, P, D), rows 0..P-1.
        scaling: the factor on the logits.
        attention: one of :data:`ATTENTIONS`.
    """
    if attention == "eager":
        return _eager(queries, keys, values, scaling)
    if attention == "flash_attention_2" and has_flash_package():
        return _flash_package(queries, keys, values, scaling)
    rows, prefix = queries.shape[2], keys.shape[2] - queries.shape[2]
    if rows == 1:  # sees every key
        return _all_keys(queries, keys, values, scaling)[0]
    chunk = _causal(queries, keys[:, :, prefix:], values[:, :, prefix:], scaling)
    if prefix == 0:
        return chunk[0]
    return _merge(_all_keys(queries, keys[:, :, :prefix], values[:, :, :prefix], scaling), chunk)


def _all_keys(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> Partial:
    """Every row sees every key. The G query heads of a KV head become rows of one head."""
    batch, heads, rows, dim = q.shape
    folded = q.reshape(batch, k.shape[1], -1, dim)
    out, lse = _kernel(q)(folded, k, v, False, scaling)
    return out.reshape(batch, heads, rows, dim), lse.reshape(batch, heads, rows)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> Partial:
    """A chunk against itself. Its K/V, C rows only, are expanded to the query heads."""
    group = q.shape[1] // k.shape[1]
    return _kernel(q)(
        q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1), True, scaling
    )


def _merge(a: Partial, b: Partial) -> torch.Tensor:
    """The softmax over the keys of both: outputs weighted by share of the exp-sum, in fp32."""
    total = torch.logaddexp(a[1], b[1])
    merged = a[0] * (a[1] - total).exp_().unsqueeze(-1)
    merged.addcmul_(b[0], (b[1] - total).exp_().unsqueeze(-1))
    return merged.to(a[0].dtype)


def _kernel(q: torch.Tensor) -> Callable[..., Partial]:
    """The fused kernel that serves this dtype, head size and device and returns log-sum-exp."""
    dim = q.shape[-1]
    if q.device.type == "cpu":
        return _flash_cpu
    if q.device.type in ("cuda", "meta"):
        if q.dtype in (torch.float16, torch.bfloat16) and dim % 8 == 0 and dim <= 256:
            return _flash
        if dim % 4 == 0:
            return _efficient
    return _maths


def _flash_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scaling: float
) -> Partial:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, scale=scaling
    )
    scopes.retag(lse, "backend")
    return out, lse


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scaling: float
) -> Partial:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scaling
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


def _maths(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scaling: float
) -> Partial:
    """Plain operators, for devices without a fused kernel that returns log-sum-exp."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    logits = (q @ k.transpose(-1, -2)).to(dtype) * scaling
    if causal:
        logits += _causal_mask(logits)
    lse = logits.logsumexp(-1)
    weights = (logits - lse.unsqueeze(-1)).exp_()
    return weights.to(v.dtype) @ v, lse


def _causal_mask(logits: torch.Tensor) -> torch.Tensor:
    """(C, P), 0 where row i may see key j ≤ i + P - C, -inf elsewhere (bottom-right aligned)."""
    rows, keys = logits.shape[-2:]
    with scopes.component("backend"):
        mask = logits.new_full((rows, keys), float("-inf"))
        return mask.triu_(diagonal=keys - rows + 1)


def _eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
    """The reference: expanded heads, full mask, fp32 softmax."""
    group = q.shape[1] // k.shape[1]
    logits = q @ k.repeat_interleave(group, dim=1).transpose(-1, -2) * scaling
    logits += _causal_mask(logits)
    weights = logits.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return weights @ v.repeat_interleave(group, dim=1)


def _flash_package(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
) -> torch.Tensor:
    """flash-attn ≥ 2.1 aligns ``causal`` to the bottom right and groups heads by itself."""
    from flash_attn import flash_attn_func

    out: torch.Tensor = flash_attn_func(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        softmax_scale=scaling,
        causal=True,
    )
    return out.transpose(1, 2)
