"""K/V on the host, one KV head visiting at a time (HeadInfer: Luo et al. 2025, 2502.12574)."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from memtrace import scopes
from tidekv.attention import Backend
from tidekv.caches import CompactCache, HostCache
from tidekv.schedules.base import Buffer, Filled, Observer, Schedule, Task, end_layer
from tidekv.schedules.chunked import token_major
from tidekv.selectors.base import Selection


@dataclass(frozen=True)
class HeadOffload(Schedule):
    """Chunk by chunk over all layers; K/V of every layer on the host, heads visit one by one.

    The device holds the prompt's K/V of one KV head. The authors' code also projects head by head,
    with slices of the weights; here a chunk's K/V of all heads exist on their way to the host.
    With a selector each layer visits the device once more, at the end, and is compressed.

    Attributes:
        chunk_size: rows that go through the layers at a time.
        piece_rows: as of :class:`~tidekv.schedules.layer_major.LayerMajor`.
    """

    cache_class: ClassVar[type[CompactCache] | None] = HostCache

    chunk_size: int = 512
    piece_rows: int = 512

    def run(self, task: Task) -> Filled:
        """As :class:`Schedule` has it."""
        layers = range(task.last_layer + 1)
        stores = [Buffer(task, task.prompt_tokens, on_host=True) for _ in layers]
        observers = [Observer(task) for _ in layers]
        by_head = replace(task, backend=_one_head_at_a_time(task.backend))
        with task.decoder.running():
            hidden = token_major(by_head, self.chunk_size, self.piece_rows, stores, observers)
            cache = task.cache
            kept: list[Selection] = []
            for index in layers:
                keys, values = stores.pop(0).read()
                if task.choice is not None:
                    with scopes.component("KV_res/full"):
                        keys, values = keys.to(hidden.device), values.to(hidden.device)
                with scopes.layer(index):
                    end_layer(task, cache, observers.pop(0).end(index, keys, values), kept)
                del keys, values
            with scopes.component("Temp"):
                return Filled(cache, task.decoder.logits(hidden), kept)


def _one_head_at_a_time(backend: Backend) -> Backend:
    def attend(
        queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        output = torch.empty_like(queries)
        group = queries.shape[1] // keys.shape[1]
        for head in range(keys.shape[1]):
            with scopes.component("KV_res/full"):
                key = keys[:, head : head + 1].to(queries.device)
                value = values[:, head : head + 1].to(queries.device)
            heads = slice(head * group, (head + 1) * group)
            output[:, heads] = backend.attend(queries[:, heads], key, value, scaling)
            del key, value
        return output

    return Backend(backend.name, f"{backend.kernel}, one KV head at a time", attend)
