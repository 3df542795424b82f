"""What decoding from kept rows must equal: all rows, and a mask for each layer and head.

The stock cache holds every row of the prompt and attention is written out, in float64.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tidekv import compat
from tidekv.caches import CompactCache, CompactLayer

#: By layer: which rows of the prompt are kept, (B, Hkv, S), bool.
Kept = Sequence[torch.Tensor]
_kept: Kept = ()


def full_cache(model: Any, ids: torch.Tensor) -> DynamicCache:
    """The stock cache after a prompt."""
    cache = DynamicCache()
    ask(model, cache, ids)
    return cache


def ask(model: Any, cache: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Logits (B, n, V) of tokens (B, n) behind what the cache has seen."""
    with torch.no_grad():
        logits: torch.Tensor = model(
            ids, use_cache=True, **{compat.cache_argument(model): cache}, **options
        ).logits
    return logits


def generate(model: Any, cache: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """12 tokens that plain ``generate`` adds, if the cache has seen all but the last of ``ids``."""
    torch.manual_seed(5)
    tokens: torch.Tensor = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=12,
        min_new_tokens=12,
        **{compat.cache_argument(model): cache},
        **options,
    )
    return tokens[:, ids.shape[1] :]


def store(cache: CompactCache, full: DynamicCache, kept: Kept) -> None:
    """Hand the kept rows of a stock cache over."""
    for layer, rows, keep in zip(cache.layers, full.layers, kept, strict=True):
        counts = keep.sum(-1)
        keys, values = rows.keys[keep], rows.values[keep]
        if len(counts.unique()) == 1:
            shape = (*counts.shape, int(counts[0, 0]), -1)
            dropped = keep.shape[2] - shape[2]
            layer.store(keys.view(shape), values.view(shape), dropped=dropped)
        else:
            layer.store_flat(keys, values, counts, prompt_tokens=keep.shape[2])
        layer.finish()


@contextmanager
def reference(model: Any, kept: Kept) -> Iterator[None]:
    """Within, ``model`` sees only these rows of the prompt, with the stock cache."""
    global _kept
    before, _kept = model.config._attn_implementation, kept
    model.set_attn_implementation("written_out")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        _kept = ()


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    keep = _kept[module.layer_idx]
    keep = keep.repeat_interleave(len(query) // len(keep), dim=0)  # beams
    group, rows = query.shape[1] // key.shape[1], key.shape[2]
    since = torch.ones(*keep.shape[:2], rows - keep.shape[2], dtype=torch.bool)
    keep = torch.cat((keep, since), dim=-1).repeat_interleave(group, dim=1).unsqueeze(2)
    at = torch.arange(rows)
    causal = at <= at[-query.shape[2] :, None]
    key, value = (x.double().repeat_interleave(group, dim=1) for x in (key, value))
    logits = query.double() @ key.mT * scaling
    if softcap:
        logits = softcap * (logits / softcap).tanh()
    weights = logits.masked_fill(~(keep & causal), float("-inf")).softmax(-1)
    return (weights @ value).to(query.dtype).transpose(1, 2), None


class FakeQuantisedLayer(CompactLayer):
    """Holds every row in full and hands out what quantising the older ones leaves of them."""

    def __init__(self, bits: int, group: int, residual: int) -> None:
        super().__init__()
        self.bits, self.group, self.residual = bits, group, residual

    def update(self, *states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.rows()
        keys, values = super().update(*states)
        old = self.group * math.ceil(max(rows - self.residual, 0) / self.group)
        keys, values = keys.clone(), values.clone()
        for start in range(0, old, self.group):
            part = slice(start, start + self.group)
            keys[:, :, part] = self._rounded(keys[:, :, part], 2)
        for start in range(0, values.shape[3], self.group):
            part = (..., slice(old), slice(start, start + self.group))
            values[part] = self._rounded(values[part], 3)
        return keys, values

    def _rounded(self, group: torch.Tensor, dim: int) -> torch.Tensor:
        low, high = group.amin(dim, keepdim=True), group.amax(dim, keepdim=True)
        step = (high - low) / (2**self.bits - 1)
        return ((group - low) / step).round() * step + low


class FakeQuantised(CompactCache):
    """The reference of a quantised cache: no codes, no packing."""

    layer_class = FakeQuantisedLayer

    def __init__(
        self, num_layers: int, bits: int = 2, group: int = 32, residual: int = 128
    ) -> None:
        super().__init__(num_layers, bits=bits, group=group, residual=residual)


ALL_ATTENTION_FUNCTIONS.register("written_out", _attention)
