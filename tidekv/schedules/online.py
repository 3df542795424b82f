"""Evict after every chunk: later chunks see the compressed cache (immediate eviction)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from memtrace import scopes
from tidekv.caches import CompactLayer, rows_of
from tidekv.models import Span
from tidekv.schedules.base import Buffer, Filled, Observer, Schedule, Task
from tidekv.schedules.chunked import token_major
from tidekv.selectors.base import Selection


@dataclass(frozen=True)
class Online(Schedule):
    """Chunk by chunk over all layers, every layer cut back to its budget after every chunk.

    The controls of the comparison: with ``snapkv`` Block-SnapKV, with ``recent`` block-recent, and
    KeyDiff as its paper has it (with ``keydiff`` and chunks of 128). What a token sees depends on
    what was evicted before it, so hidden states drift from those of the whole prompt.

    Attributes:
        chunk_size: rows that go through the layers between two evictions.
        piece_rows: as of :class:`~tidekv.schedules.layer_major.LayerMajor`.
    """

    whole_layers: ClassVar[bool] = False
    keeps_all: ClassVar[bool] = False

    chunk_size: int = 512
    piece_rows: int = 512

    def run(self, task: Task) -> Filled:
        """As :class:`Schedule` has it."""
        assert task.choice is not None
        layers = range(task.last_layer + 1)
        present = [_Present(task, index, self.chunk_size) for index in layers]
        observers = [Observer(task) for _ in layers]

        def evict(index: int, span: Span) -> None:
            present[index].evict(observers[index], span)
            if span.stop == span.total and task.on_layer is not None:
                task.on_layer(index)

        with task.decoder.running():
            hidden = token_major(task, self.chunk_size, self.piece_rows, present, observers, evict)
            cache = task.cache
            kept = [Selection(one.positions) for one in present if one.positions is not None]
            for index in layers:
                with scopes.layer(index), scopes.phase("compress"):
                    _hand_over(present.pop(0), cache.layers[index], task.prompt_tokens)
            with scopes.component("Temp"):
                return Filled(cache, task.decoder.logits(hidden), kept)


def _hand_over(present: "_Present", layer: CompactLayer, prompt_tokens: int) -> None:
    """What is there of a layer goes to the cache, which alone holds it from then on."""
    keys, values = present.read()
    layer.store(keys, values, dropped=prompt_tokens - keys.shape[2])
    del present, keys, values
    layer.finish()


class _Present(Buffer):
    """The rows of one layer that are there: what was kept so far, and the newest chunk."""

    def __init__(self, task: Task, index: int, chunk_size: int) -> None:
        assert task.choice is not None
        self._task, self._index, self._choice = task, index, task.choice
        self._budget = task.choice.rows(index)
        super().__init__(task, min(self._budget + chunk_size, task.prompt_tokens))
        #: Where in the prompt the rows are, (B, Hkv, rows), if the task wants to know.
        self.positions: torch.Tensor | None = None
        if task.keep_indices:
            shape = (task.input_ids.shape[0], task.decoder.kv_heads, 0)
            self.positions = torch.empty(shape, dtype=torch.int64, device=task.decoder.device)

    def evict(self, observer: Observer, span: Span) -> None:
        """Keep no more than the budget of the rows that are there."""
        if self.positions is not None:
            new = torch.arange(span.start, span.stop, device=self.positions.device)
            new = new.expand(*self.positions.shape[:2], -1)
            self.positions = torch.cat((self.positions, new), dim=-1)
        if self.rows <= self._budget:
            return
        end = observer.end(self._index, *self.read(), span.stop)
        with scopes.component("Temp"):
            with scopes.phase("score"):
                indices = self._choice.select(end).indices
            with scopes.phase("compress"), scopes.component("KV_res/compact"):
                keys, values = rows_of(end.keys, end.values, indices)
            if self.positions is not None:
                self.positions = self.positions.gather(-1, indices)
        del end
        if span.stop == span.total:  # the cache takes over what was gathered
            self.keys, self.values, self.rows = keys, values, keys.shape[2]
        else:
            self.rows = 0
            self.write(keys, values)
