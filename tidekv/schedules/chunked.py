"""Token-major chunks, each through all layers before the next: the usual chunked prefill."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from memtrace import scopes
from tidekv.models import Span
from tidekv.models.stock import Store
from tidekv.schedules.base import Buffer, Filled, Observer, Schedule, Task, end_layer
from tidekv.selectors.base import Selection


@dataclass(frozen=True)
class Chunked(Schedule):
    """Chunk by chunk over all layers; full K/V of every layer until the prompt has been read.

    Without eviction this is the usual chunked prefill. With a selector each layer is compressed
    once the prompt is complete.

    Attributes:
        chunk_size: rows that go through the layers at a time.
        piece_rows: as of :class:`~tidekv.schedules.layer_major.LayerMajor`.
    """

    chunk_size: int = 512
    piece_rows: int = 512

    def run(self, task: Task) -> Filled:
        """As :class:`Schedule` has it."""
        layers = range(task.last_layer + 1)
        buffers = [Buffer(task, task.prompt_tokens) for _ in layers]
        observers = [Observer(task) for _ in layers]
        with task.decoder.running():
            hidden = token_major(task, self.chunk_size, self.piece_rows, buffers, observers)
            cache = task.cache
            kept: list[Selection] = []
            for index in layers:
                with scopes.layer(index):
                    end = observers.pop(0).end(index, *buffers.pop(0).read())
                    end_layer(task, cache, end, kept)
                    del end
            with scopes.component("Temp"):
                return Filled(cache, task.decoder.logits(hidden), kept)


def token_major(
    task: Task,
    chunk_size: int,
    piece_rows: int,
    stores: Sequence[Store],
    observers: Sequence[Observer],
    after: Callable[[int, Span], None] = lambda index, span: None,
) -> torch.Tensor:
    """Advance chunk by chunk through all layers.

    Args:
        stores: where each layer's keys and values go.
        after: called when a layer has seen a chunk.

    Returns:
        The last layer's output for the last row, (B, 1, d).
    """
    decoder = task.decoder
    decoder.piece_rows = piece_rows
    for number, span in enumerate(task.spans(chunk_size)):
        with scopes.chunk(number):
            with scopes.component("Hidden"):
                hidden = decoder.embed(task.input_ids[:, span.start : span.stop])
            for index, (store, observer) in enumerate(zip(stores, observers, strict=True)):
                with scopes.layer(index):
                    with scopes.component("Act"):
                        decoder.step(task.step(index, span, store, observer), hidden)
                    after(index, span)
    with scopes.component("Hidden"):
        return hidden[:, -1:].clone()
