"""What every schedule is given and gives back, and the compression at a layer's end."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from memtrace import scopes
from tidekv.cache import CompactCache
from tidekv.models import Decoder
from tidekv.selectors.base import LayerEnd, Selector


@dataclass(frozen=True)
class Eviction:
    """What is kept of a layer: ``rows`` of the prompt per KV head, chosen by ``selector``."""

    selector: Selector
    rows: int
    scoring: str


@dataclass(frozen=True)
class Task:
    """One checked prefill. ``input_ids`` is (B, S); ``eviction`` None keeps every row."""

    decoder: Decoder
    input_ids: torch.Tensor
    eviction: Eviction | None
    chunk_size: int
    attention: str
    keep_indices: bool
    on_layer: Callable[[int], None] | None = None

    @property
    def observed_rows(self) -> int:
        """How many of the last queries outlive their chunk; the last row's always does."""
        return self.eviction.selector.window if self.eviction else 1


@dataclass(frozen=True)
class Filled:
    """A finished prefill: the cache, last logits (B, V), kept positions by layer if asked for."""

    cache: CompactCache
    logits: torch.Tensor
    indices: list[torch.Tensor] = field(default_factory=list)


def end_layer(cache: CompactCache, layer: LayerEnd, task: Task) -> list[torch.Tensor]:
    """Move what ``task.eviction`` keeps of a finished layer into ``cache``.

    Returns:
        The kept positions, one (B, Hkv, rows), if the task keeps them; none with no eviction.
    """
    indices = []
    if task.eviction is None:
        cache.layers[layer.index].store(layer.keys, layer.values, dropped=0)
    else:
        kept = _evict(cache, layer, task.eviction)
        indices = [kept] if task.keep_indices else []
    if task.on_layer is not None:
        task.on_layer(layer.index)
    return indices


def _evict(cache: CompactCache, layer: LayerEnd, eviction: Eviction) -> torch.Tensor:
    with scopes.component("Temp"):
        with scopes.phase("score"):
            indices = eviction.selector.select(layer, eviction.rows, eviction.scoring)
        with scopes.phase("compress"):
            rows = indices.unsqueeze(-1).expand(-1, -1, -1, layer.keys.shape[-1])
            with scopes.component("KV_res/compact"):
                keys, values = layer.keys.gather(2, rows), layer.values.gather(2, rows)
    dropped = layer.keys.shape[2] - eviction.rows
    cache.layers[layer.index].store(keys, values, dropped=dropped)
    return indices
