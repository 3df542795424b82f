"""TideKV: finish a layer for the whole prompt, chunk by chunk, before the next one begins.

At any time finished layers hold compact caches, the active layer alone holds the prompt's K/V (one
buffer that all layers reuse), later layers hold nothing. Between layers the hidden states live in
one tensor, overwritten in place. Of the last layer only what the first token needs is computed,
where the model allows it.

No local may keep a tensor past its use: a name bound to a consumed chunk costs its bytes through
the whole layer, which is why projections are written where they are consumed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from memtrace import scopes
from tidekv.models.stock import Span, Step
from tidekv.schedules.base import Buffer, Filled, Observer, Schedule, Task, end_layer
from tidekv.schedules.bridge import Bridge, DeviceBridge, HostBridge
from tidekv.selectors.base import Selection


@dataclass(frozen=True)
class LayerMajor(Schedule):
    """TideKV: layer by layer over all chunks, each layer compressed at its end.

    Attributes:
        chunk_size: rows that a layer advances at a time.
        piece_rows: rows that norms, projections and the MLP take at a time within a chunk, where
            the model's layer can be taken apart.
        device: where to compute, if not where the model's layers are. Embeddings and head may be
            elsewhere: rows come chunk by chunk, the head visits at the end.
        stream_weights: have each layer's weights visit the device once per prompt, through two
            slots, the next layer's while one runs.
        host_bridge: keep hidden states on the host, but for two chunks.
        park_caches: keep finished layers' caches on the host until decoding.
    """

    chunk_size: int = 512
    piece_rows: int = 512
    device: str | None = None
    stream_weights: bool = False
    host_bridge: bool = False
    park_caches: bool = False

    def run(self, task: Task) -> Filled:
        """As :class:`Schedule` has it."""
        decoder = task.decoder
        decoder.stream_weights, decoder.piece_rows = self.stream_weights, self.piece_rows
        cache = task.cache
        kept: list[Selection] = []
        bridge: Bridge = (HostBridge if self.host_bridge else DeviceBridge)(
            task, task.spans(self.chunk_size)
        )
        observer = Observer(task)
        buffer = Buffer(task, task.prompt_tokens)
        leaves = self.park_caches and decoder.device.type != "cpu"
        with decoder.running():
            for index in range(task.last_layer + 1):
                with scopes.layer(index), decoder.layer(index):
                    if index < task.last_layer:
                        _each_chunk(task, index, buffer, observer, bridge, decoder.step)
                    else:
                        _each_chunk(task, index, buffer, observer, bridge, decoder.project)
                        hidden = bridge.last_row()
                        del bridge
                        last = Span(task.prompt_tokens - 1, task.prompt_tokens, task.prompt_tokens)
                        with scopes.component("Act"):
                            decoder.last_row(task.step(index, last, buffer, observer), hidden)
                    end_layer(task, cache, observer.end(index, *buffer.read()), kept)
                    observer.clear()
                    buffer.rows = 0
                    if leaves:
                        cache.layers[index].to(torch.device("cpu"))
                    elif task.choice is None and index < task.last_layer:
                        buffer = Buffer(task, task.prompt_tokens)  # the cache has the other one
            decoder.release()
            del buffer, observer
            with scopes.component("Temp"):
                return Filled(cache, decoder.logits(hidden), kept)


def _each_chunk(
    task: Task,
    index: int,
    buffer: Buffer,
    observer: Observer,
    bridge: Bridge,
    advance: Callable[[Step, torch.Tensor], None],
) -> None:
    for number, span in enumerate(bridge.spans):
        with scopes.chunk(number), scopes.component("Act"), bridge.chunk(number) as chunk:
            advance(task.step(index, span, buffer, observer), chunk)
