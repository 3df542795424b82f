"""The one place that knows how a model family computes its decoder layer.

The families share one shape: pre-norm, rotary grouped-query attention, gated MLP. Modules of the
model are called as they are (so their hooks, biases and quantisation hold); only the order of the
steps, and what lives when, is ours.

Shapes: B batch, C rows of a chunk, S prompt rows, d hidden size, Hq query heads, Hkv KV heads,
D head size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tidekv.errors import InfeasibleError

#: ``config.model_type`` → whether queries and keys are normalised per head before the rotation.
FAMILIES = {"llama": False, "mistral": False, "qwen2": False, "qwen3": True}

#: cos and sin, each (1, C, D).
RopeTable = tuple[torch.Tensor, torch.Tensor]


def rotate(x: torch.Tensor, table: RopeTable) -> torch.Tensor:
    """Rotary position embedding of (B, H, C, D) in the half-split convention; a new tensor."""
    cos, sin = (part.unsqueeze(1) for part in table)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1).mul_(sin).add_(x * cos)


@dataclass(frozen=True)
class Decoder:
    """The parts of a causal language model that a schedule drives."""

    model: Any
    layers: list[Any]
    query_heads: int
    kv_heads: int
    head_dim: int
    head_norm: bool

    @classmethod
    def of(cls, model: Any) -> "Decoder":
        """
        Raises:
            InfeasibleError: the model's family is not one of :data:`FAMILIES`.
        """
        config = model.config
        if config.model_type not in FAMILIES:
            raise InfeasibleError(
                f"Models of the family {config.model_type!r} are not supported; "
                f"use one of {', '.join(FAMILIES)}."
            )
        heads = config.num_attention_heads
        return cls(
            model=model,
            layers=list(model.model.layers),
            query_heads=heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            head_norm=FAMILIES[config.model_type],
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        return self.model.device

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(B, C) → (B, C, d)"""
        return self.model.model.embed_tokens(input_ids)

    def rope_table(self, start: int, stop: int, prompt_tokens: int) -> RopeTable:
        """Rotation of the positions start..stop-1 of a prompt of ``prompt_tokens``.

        The prompt's last position rides along: scaled variants (dynamic, longrope) choose their
        frequencies by the largest position of a call, which must be that of the whole prompt.
        """
        positions = torch.arange(start, stop + 1, device=self.device)
        positions[-1] = prompt_tokens - 1
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        cos, sin = self.model.model.rotary_emb(like, positions[None])
        return cos[:, :-1], sin[:, :-1]

    def queries(self, layer: Any, normed: torch.Tensor, table: RopeTable) -> torch.Tensor:
        """(B, C, d) after the input norm → rotated queries (B, Hq, C, D)"""
        norm = layer.self_attn.q_norm if self.head_norm else None
        return rotate(self._heads(layer.self_attn.q_proj, normed, norm), table)

    def keys(self, layer: Any, normed: torch.Tensor, table: RopeTable) -> torch.Tensor:
        """(B, C, d) after the input norm → rotated keys (B, Hkv, C, D)"""
        norm = layer.self_attn.k_norm if self.head_norm else None
        return rotate(self._heads(layer.self_attn.k_proj, normed, norm), table)

    def values(self, layer: Any, normed: torch.Tensor) -> torch.Tensor:
        """(B, C, d) after the input norm → values (B, Hkv, C, D)"""
        return self._heads(layer.self_attn.v_proj, normed, None)

    def _heads(
        self, projection: nn.Module, normed: torch.Tensor, norm: nn.Module | None
    ) -> torch.Tensor:
        """Project and split into heads: (B, C, d) → (B, H, C, D), a view."""
        heads = projection(normed).unflatten(-1, (-1, self.head_dim))
        if norm is not None:
            heads = norm(heads)
        return heads.transpose(1, 2)

    def attention_output(self, layer: Any, heads: torch.Tensor) -> torch.Tensor:
        """(B, Hq, C, D) → (B, C, d)"""
        return layer.self_attn.o_proj(heads.transpose(1, 2).flatten(2))

    def mlp(self, layer: Any, normed: torch.Tensor) -> torch.Tensor:
        """(B, C, d) → (B, C, d). The product overwrites the gate: two (B, C, d_ff), not three."""
        mlp = layer.mlp
        gate = mlp.act_fn(mlp.gate_proj(normed))
        return mlp.down_proj(gate.mul_(mlp.up_proj(normed)))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and head: (B, C, d) → (B, C, V)"""
        return self.model.lm_head(self.model.model.norm(hidden))

    def scaling(self, layer: Any) -> float:
        """The factor on the attention logits, 1/√D for these families."""
        return float(layer.self_attn.scaling)
