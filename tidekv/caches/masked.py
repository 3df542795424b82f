"""Keys that bring the part of the mask which transformers can't express.

transformers makes one mask for all heads and layers. A layer whose heads keep unequal numbers of
rows, or one that keeps more rows than its neighbours, hands its attention code keys of this class.
It stands in at the two places where stock code meets a mask: in
``F.scaled_dot_product_attention``, and in ``softmax(query @ keysᵀ · scaling + mask)`` of eager
attention. Whatever else would use the padding is refused.

Shapes: B batch, Hq query heads, Hkv KV heads, H either, n new tokens, P rows of the layer (padded
to its longest head), D head size, m rows decoded since the prompt; P = kept + m.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from memtrace import scopes
from tidekv.errors import InfeasibleError

#: Looking at keys or logits, not at their values.
_HARMLESS = frozenset(
    ("shape", "size", "dim", "ndim", "dtype", "device", "is_cuda", "requires_grad", "__repr__")
)


@dataclass(frozen=True)
class Columns:
    """What the P columns of a layer's attention logits are: kept rows, then the decoded ones.

    Attributes:
        visible: (B, Hkv, kept), bool, false where a head has padding; None without padding.
        decoded: m.
    """

    visible: torch.Tensor | None
    decoded: int

    def widen(self, mask: torch.Tensor, rows: int) -> torch.Tensor:
        """The model's mask (…, 1 + m) for ``rows`` columns: its first stands for all kept rows.

        One that has all columns already, as callers may pass, is left as it is.
        """
        if mask.shape[-1] == rows:
            return mask
        if mask.shape[-1] != 1 + self.decoded:
            raise InfeasibleError(
                f"An attention mask must have {rows} columns here, or {1 + self.decoded} (one for "
                f"the prompt and one for each token since), not {mask.shape[-1]}; leave it out."
            )
        prompt = mask[..., :1].expand(*mask.shape[:-1], rows - self.decoded)
        return torch.cat((prompt, mask[..., 1:]), dim=-1)

    def hide(self, mask: torch.Tensor | None, heads: int) -> torch.Tensor | None:
        """A mask or logits (…, P), bool or added, in which padding of any head is hidden too."""
        if self.visible is None:
            return mask
        seen = F.pad(self.visible, (0, self.decoded), value=True)
        seen = seen.repeat_interleave(heads // seen.shape[1], dim=1).unsqueeze(2)  # (B, H, 1, P)
        if mask is None:
            return seen
        if mask.dtype == torch.bool:
            return mask & seen
        return mask.where(seen, float("-inf"))


class _Masked(torch.Tensor):
    """A tensor of which only some functions may be called."""

    columns: Columns

    def plain(self) -> torch.Tensor:
        """Without this class's doings."""
        return self.as_subclass(torch.Tensor)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Attributes come as the getter of a descriptor, which knows their name.
        name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if name in _HARMLESS:
                return func(*args, **kwargs)
            answer = cls._answer(name, func, args, kwargs)
            if answer is not NotImplemented:
                return answer
            masked = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Masked))
            if all(tensor.columns.visible is None for tensor in masked):
                return func(*args, **kwargs)  # no padding: nothing that could go wrong unseen
        raise InfeasibleError(
            f"Attention code that calls {name} can't use heads with unequal numbers of rows; use "
            'model.set_attn_implementation("sdpa") or "eager".'
        )

    @classmethod
    def _answer(cls, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result, or NotImplemented."""
        raise NotImplementedError


class MaskedKeys(_Masked):
    """Keys (B, H, P, D), or (B, H, D, P) once they are ``turned``."""

    turned: bool

    @classmethod
    def of(cls, keys: torch.Tensor, visible: torch.Tensor | None, decoded: int) -> "MaskedKeys":
        """Keys (B, Hkv, P, D) whose last ``decoded`` rows came after the prompt."""
        return cls._of(keys, Columns(visible, decoded), turned=False)

    @classmethod
    def _of(cls, keys: torch.Tensor, columns: Columns, *, turned: bool) -> "MaskedKeys":
        masked = keys.as_subclass(cls)
        masked.columns, masked.turned = columns, turned
        return masked

    @classmethod
    def _answer(cls, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "scaled_dot_product_attention":
            return _sdpa(*args, **kwargs)
        if not args or kwargs:
            return NotImplemented
        self, *others = args
        if name == "matmul" and isinstance(others[0], MaskedKeys) and others[0].turned:
            return _Logits.of(torch.matmul(self, others[0].plain()), others[0].columns)
        if not isinstance(self, MaskedKeys) or self.turned:
            return NotImplemented
        keys = self.plain()
        if name == "transpose" and sorted(dim % keys.dim() for dim in others) == [2, 3]:
            return cls._of(keys.transpose(2, 3), self.columns, turned=True)
        # The steps of transformers' repeat_kv.
        if name in ("expand", "reshape") or (name == "__getitem__" and _adds_group(others[0])):
            repeated = func(keys, *others)
            if repeated.shape[-2:] == keys.shape[-2:]:
                return cls._of(repeated, self.columns, turned=False)
        return NotImplemented


class _Logits(_Masked):
    """``query @ keysᵀ`` (B, H, n, P) on its way to the softmax."""

    @classmethod
    def of(cls, logits: torch.Tensor, columns: Columns) -> "_Logits":
        masked = logits.as_subclass(cls)
        masked.columns = columns
        return masked

    @classmethod
    def _answer(cls, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args or not isinstance(args[0], _Logits) or (kwargs and name != "softmax"):
            return NotImplemented
        self, *others = args
        logits, columns = self.plain(), self.columns
        if name == "softmax":
            return func(columns.hide(logits, logits.shape[1]), *others, **kwargs)
        if name == "add" and isinstance(others[0], torch.Tensor):
            return cls.of(logits + columns.widen(others[0], logits.shape[-1]), columns)
        # Scaling and capping.
        if name == "tanh" or (name in ("mul", "div") and not isinstance(others[0], torch.Tensor)):
            return cls.of(func(logits, *others), columns)
        return NotImplemented


def _adds_group(index: Any) -> bool:
    """Whether an index is ``[:, :, None, :, :]``."""
    everything = slice(None)
    return bool(index == (everything, everything, None, everything, everything))


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """What ``F.scaled_dot_product_attention`` is to return, (B, Hq, n, D), or NotImplemented."""
    if not isinstance(key, MaskedKeys) or key.turned:
        return NotImplemented
    if is_causal:
        raise InfeasibleError(
            "Attention code that hands over several tokens with is_causal and no mask can't use a "
            "compact cache; use transformers' own."
        )
    shape = query.shape
    one_mask = attn_mask is None or attn_mask.shape[1] == 1
    if enable_gqa and shape[2] == 1 and one_mask:
        # A group's query heads become rows: with a mask, kernels on CUDA would expand the keys.
        query, enable_gqa = query.reshape(shape[0], key.shape[1], -1, shape[3]), False
    with scopes.component("Temp"):
        mask = None if attn_mask is None else key.columns.widen(attn_mask, key.shape[2])
        mask = key.columns.hide(mask, query.shape[1])
    attended = F.scaled_dot_product_attention(
        query,
        key.plain(),
        value,
        attn_mask=mask,
        dropout_p=dropout_p,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return attended.reshape(*shape[:-1], value.shape[-1])
