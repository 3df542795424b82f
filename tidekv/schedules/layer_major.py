"""TideKV: finish a layer for the whole prompt, chunk by chunk, before the next one begins.

At any time finished layers hold compact caches, the active layer alone holds the prompt's K/V (one
buffer that all layers reuse), later layers hold nothing. Between layers the hidden states live in
one slot per chunk, overwritten in place. The last layer frees every slot once its K/V are
projected, and computes only what the first token needs.

No local may keep a tensor past its use: a name bound to a consumed slot costs its bytes through
the whole layer, which is why projections are written where they are consumed.
"""

from dataclasses import dataclass
from typing import Any

import torch

from memtrace import scopes
from tidekv.attention import attend
from tidekv.cache import CompactCache
from tidekv.models import RopeTable
from tidekv.schedules.base import Filled, Task, end_layer
from tidekv.selectors.base import LayerEnd


@dataclass(frozen=True)
class _Active:
    """The layer that runs: keys, values (B, Hkv, S, D) and the last queries (B, Hq, W, D)."""

    index: int
    layer: Any
    keys: torch.Tensor
    values: torch.Tensor
    observed: torch.Tensor


@dataclass(frozen=True)
class _Chunk:
    """Rows start..stop-1 of the prompt; ``tail`` of them belong to the last queries."""

    start: int
    stop: int
    tail: int


def layer_major(task: Task) -> Filled:
    """Prefill in the layer-major order. See the module."""
    decoder, prompt_tokens = task.decoder, task.input_ids.shape[1]
    chunks = _chunks(prompt_tokens, task.chunk_size, task.observed_rows)
    cache = CompactCache(len(decoder.layers))
    indices: list[torch.Tensor] = []
    with scopes.component("Hidden"):
        bridge = [decoder.embed(task.input_ids[:, chunk.start : chunk.stop]) for chunk in chunks]
    with scopes.component("Temp"):
        observed = _empty(task, decoder.query_heads, task.observed_rows)
    keys, values = _full_buffers(task)
    last = len(decoder.layers) - 1
    for index, layer in enumerate(decoder.layers):
        with scopes.layer(index):
            active = _Active(index, layer, keys, values, observed)
            if index < last:
                for number, chunk in enumerate(chunks):
                    with scopes.chunk(number), scopes.component("Act"):
                        _advance(task, active, chunk, bridge[number])
            else:
                hidden = _finish(task, active, chunks, bridge)
            end = LayerEnd(index, observed, keys, values, decoder.scaling(layer))
            indices += end_layer(cache, end, task)
            if task.eviction is None and index < last:  # the cache owns the buffers now
                keys, values = _full_buffers(task)
    del active, end, keys, values, observed
    with scopes.component("Temp"):
        return Filled(cache, decoder.logits(hidden)[:, -1], indices)


def _chunks(prompt_tokens: int, chunk_size: int, observed_rows: int) -> list[_Chunk]:
    chunks = []
    for start in range(0, prompt_tokens, chunk_size):
        stop = min(start + chunk_size, prompt_tokens)
        tail = min(max(stop - (prompt_tokens - observed_rows), 0), stop - start)
        chunks.append(_Chunk(start, stop, tail))
    return chunks


def _empty(task: Task, heads: int, rows: int) -> torch.Tensor:
    decoder = task.decoder
    shape = (task.input_ids.shape[0], heads, rows, decoder.head_dim)
    return torch.empty(shape, dtype=decoder.dtype, device=decoder.device)


def _full_buffers(task: Task) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the whole prompt in one layer, each (B, Hkv, S, D)."""
    with scopes.component("KV_res/full"):
        rows = task.input_ids.shape[1]
        return _empty(task, task.decoder.kv_heads, rows), _empty(task, task.decoder.kv_heads, rows)


def _write_kv(
    task: Task, active: _Active, chunk: _Chunk, normed: torch.Tensor, table: RopeTable
) -> None:
    rows = slice(chunk.start, chunk.stop)
    active.keys[:, :, rows] = task.decoder.keys(active.layer, normed, table)
    active.values[:, :, rows] = task.decoder.values(active.layer, normed)


def _observe(task: Task, active: _Active, chunk: _Chunk, queries: torch.Tensor) -> None:
    """Keep the chunk's last ``tail`` queries where the window has them."""
    if chunk.tail:
        end = active.observed.shape[2] - (task.input_ids.shape[1] - chunk.stop)
        active.observed[:, :, end - chunk.tail : end] = queries[:, :, -chunk.tail :]


def _advance(task: Task, active: _Active, chunk: _Chunk, hidden: torch.Tensor) -> None:
    """One layer for one chunk; ``hidden`` (B, C, d) is overwritten with the layer's output."""
    decoder, layer = task.decoder, active.layer
    normed = layer.input_layernorm(hidden)
    table = decoder.rope_table(chunk.start, chunk.stop, task.input_ids.shape[1])
    _write_kv(task, active, chunk, normed, table)
    queries = decoder.queries(layer, normed, table)
    del normed, table
    _observe(task, active, chunk, queries)
    hidden += decoder.attention_output(
        layer,
        attend(
            queries,
            active.keys[:, :, : chunk.stop],
            active.values[:, :, : chunk.stop],
            scaling=decoder.scaling(layer),
            attention=task.attention,
        ),
    )
    del queries
    hidden += decoder.mlp(layer, layer.post_attention_layernorm(hidden))


def _finish(
    task: Task, active: _Active, chunks: list[_Chunk], bridge: list[torch.Tensor]
) -> torch.Tensor:
    """The last layer: K/V of every row, then the rest for the last row alone: (B, 1, d)."""
    decoder, layer = task.decoder, active.layer
    for number, chunk in enumerate(chunks):
        with scopes.chunk(number), scopes.component("Act"):
            slot = bridge.pop(0)
            normed = layer.input_layernorm(slot)
            if number == len(chunks) - 1:
                with scopes.component("Hidden"):
                    hidden = slot[:, -1:].clone()
            del slot
            table = decoder.rope_table(chunk.start, chunk.stop, task.input_ids.shape[1])
            _write_kv(task, active, chunk, normed, table)
            if chunk.tail:
                cos, sin = (part[:, -chunk.tail :] for part in table)
                queries = decoder.queries(layer, normed[:, -chunk.tail :], (cos, sin))
                _observe(task, active, chunk, queries)
                del queries, cos, sin
            del normed, table
    with scopes.component("Act"):
        hidden += decoder.attention_output(
            layer,
            attend(
                active.observed[:, :, -1:],
                active.keys,
                active.values,
                scaling=decoder.scaling(layer),
                attention=task.attention,
            ),
        )
        hidden += decoder.mlp(layer, layer.post_attention_layernorm(hidden))
    return hidden
