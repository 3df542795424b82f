"""Families whose layer is pre-norm, rotary attention and a gated MLP, step by step and in place.

Modules of the model are called as they are (so their hooks, biases and quantisation hold); only the
order of the steps, and what lives when, is ours: norms, projections and the MLP run on a piece of
the chunk's rows at a time, and both residual additions happen in the hidden states themselves.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tidekv.models.stock import RopeTable, Step, StockDecoder

#: ``config.model_type`` → whether queries and keys are normalised per head before the rotation.
HEAD_NORM = {"llama": False, "mistral": False, "qwen2": False, "qwen3": True}


def rotate(x: torch.Tensor, table: RopeTable) -> torch.Tensor:
    """Rotary position embedding of (B, H, C, D) in the half-split convention; a new tensor."""
    cos, sin = (part.unsqueeze(1) for part in table)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1).mul_(sin).add_(x * cos)


class TightDecoder(StockDecoder):
    """The parts of a causal language model that a schedule drives, with less alive at a time."""

    def __init__(self, model: Any, device: torch.device | None = None) -> None:
        super().__init__(model, device)
        self._head_norm = HEAD_NORM[model.config.model_type]

    @contextmanager
    def _taken_over(self) -> Iterator[None]:
        yield  # nothing of the model is replaced

    def step(self, step: Step, hidden: torch.Tensor) -> None:
        """As :meth:`StockDecoder.step`."""
        layer = self.layers[step.index]
        queries = self._empty_queries(hidden)
        whole = self.rope_table(step.span)
        for rows in self._pieces(hidden):
            normed = layer.input_layernorm(hidden[:, rows])
            step.watch.inputs(step.index, normed)
            table = _part(whole, rows)
            step.store.write(*self._keys_and_values(layer, normed, table))
            queries[:, :, rows] = self._queries(layer, normed, table)
            del normed, table
        del whole
        step.watch.queries(step.index, queries, step.store)
        attended = step.backend.attend(queries, *step.store.read(), self.scaling(step.index))
        del queries
        for rows in self._pieces(hidden):
            hidden[:, rows] += _projected(layer, attended[:, :, rows])
        del attended
        for rows in self._pieces(hidden):
            hidden[:, rows] += self._mlp(layer, layer.post_attention_layernorm(hidden[:, rows]))

    def project(self, step: Step, hidden: torch.Tensor) -> None:
        """Keys and values of a chunk (B, C, d) alone, and the queries of the prompt's last rows."""
        layer, wanted = self.layers[step.index], step.watch.query_rows
        first = 0 if wanted is None else max(step.span.total - wanted - step.span.start, 0)
        whole = self.rope_table(step.span)
        for rows in self._pieces(hidden):
            normed = layer.input_layernorm(hidden[:, rows])
            step.watch.inputs(step.index, normed)
            table = _part(whole, rows)
            step.store.write(*self._keys_and_values(layer, normed, table))
            if rows.stop > first:
                tail = slice(max(first - rows.start, 0), None)
                queries = self._queries(layer, normed[:, tail], _part(table, tail))
                step.watch.queries(step.index, queries, step.store)
                del queries
            del normed, table

    def last_row(self, step: Step, hidden: torch.Tensor) -> None:
        """As :meth:`StockDecoder.last_row`: all but keys and values."""
        layer = self.layers[step.index]
        normed = layer.input_layernorm(hidden)
        query = self._queries(layer, normed, self.rope_table(step.span))
        hidden += _projected(
            layer, step.backend.attend(query, *step.store.read(), self.scaling(step.index))
        )
        hidden += self._mlp(layer, layer.post_attention_layernorm(hidden))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.lm_head(self.base.norm(hidden))
        return logits[:, -1]

    def _pieces(self, hidden: torch.Tensor) -> Iterator[slice]:
        """The rows of a chunk, some at a time."""
        for start in range(0, hidden.shape[1], self.piece_rows):
            yield slice(start, min(start + self.piece_rows, hidden.shape[1]))

    def _empty_queries(self, hidden: torch.Tensor) -> torch.Tensor:
        shape = (hidden.shape[0], self.query_heads, hidden.shape[1], self.head_dim)
        return hidden.new_empty(shape)

    def _queries(self, layer: Any, normed: torch.Tensor, table: RopeTable) -> torch.Tensor:
        """(B, C, d) after the input norm → rotated queries (B, Hq, C, D)"""
        norm = layer.self_attn.q_norm if self._head_norm else None
        return rotate(self._heads(layer.self_attn.q_proj, normed, norm), table)

    def _keys_and_values(
        self, layer: Any, normed: torch.Tensor, table: RopeTable
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, C, d) after the input norm → rotated keys and values, (B, Hkv, C, D) each"""
        norm = layer.self_attn.k_norm if self._head_norm else None
        return (
            rotate(self._heads(layer.self_attn.k_proj, normed, norm), table),
            self._heads(layer.self_attn.v_proj, normed, None),
        )

    def _heads(
        self, projection: nn.Module, normed: torch.Tensor, norm: nn.Module | None
    ) -> torch.Tensor:
        """Project and split into heads: (B, C, d) → (B, H, C, D), a view."""
        heads = projection(normed).unflatten(-1, (-1, self.head_dim))
        if norm is not None:
            heads = norm(heads)
        return heads.transpose(1, 2)

    def _mlp(self, layer: Any, normed: torch.Tensor) -> torch.Tensor:
        """(B, C, d) → (B, C, d). The product overwrites the gate: two (B, C, d_ff), not three."""
        mlp = layer.mlp
        gate = mlp.act_fn(mlp.gate_proj(normed))
        output: torch.Tensor = mlp.down_proj(gate.mul_(mlp.up_proj(normed)))
        return output


def _part(table: RopeTable, rows: slice) -> RopeTable:
    return table[0][:, rows], table[1][:, rows]


def _projected(layer: Any, heads: torch.Tensor) -> torch.Tensor:
    """Heads (B, Hq, C, D) → what attention adds, (B, C, d)."""
    output: torch.Tensor = layer.self_attn.o_proj(heads.transpose(1, 2).flatten(2))
    return output
