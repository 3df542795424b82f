"""TideKV with what its authors' implementation appears to hold, to compare figures with theirs.

The order is that of :mod:`~tidekv.schedules.layer_major`, and so are the results. Alive are, beside
the finished layers' compact caches,

- the hidden states as a list of chunks, whose slot is empty while a layer runs on it;
- K and V of the running layer three times: as a list of chunks, as one tensor for attention that
  stays through the MLP, and of the newest chunk as projection and rotation made them;
- the MLP of a whole chunk by stock code, in the last layer too;
- where attention isn't FlashAttention, a (C, P) mask through the whole layer, and K and V expanded
  to the query heads while attention runs.

docs/tables.md says how each of them follows from a published figure.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from memtrace import scopes
from tidekv.attention import FLASH, by_transformers, causal_mask
from tidekv.models import PublishedDecoder, Span
from tidekv.schedules.base import Filled, Observer, Schedule, Task, end_layer
from tidekv.selectors.base import Selection


@dataclass(frozen=True)
class LayerMajorPublished(Schedule):
    """TideKV with what its authors' implementation appears to hold, for comparison with theirs.

    Attributes:
        chunk_size: rows that a layer advances at a time.
    """

    chunk_size: int = 2048

    def run(self, task: Task) -> Filled:
        """As :class:`Schedule` has it."""
        decoder = PublishedDecoder(task.decoder.model)
        spans = task.spans(self.chunk_size)
        with scopes.component("Hidden"):
            hidden: list[Any] = [
                decoder.embed(task.input_ids[:, span.start : span.stop]) for span in spans
            ]
        kept: list[Selection] = []
        observer = Observer(task)
        with decoder.running():
            for index in range(task.last_layer + 1):
                store = _Chunks()
                with scopes.layer(index):
                    for number, span in enumerate(spans):
                        store.end_chunk()
                        with scopes.chunk(number), scopes.component("Act"):
                            _advance(task, decoder, index, span, store, observer, hidden, number)
                    end_layer(task, task.cache, observer.end(index, *store.read()), kept)
                    observer.clear()
            del store, observer
            with scopes.component("Temp"):
                return Filled(task.cache, decoder.logits(hidden[-1][:, -1:]), kept)


def _advance(
    task: Task,
    decoder: PublishedDecoder,
    index: int,
    span: Span,
    store: "_Chunks",
    observer: Observer,
    hidden: list[Any],
    number: int,
) -> None:
    """One layer for one chunk."""
    step = task.step(index, span, store, observer)
    if task.backend.name not in FLASH:
        mask = causal_mask(hidden[number], span.stop - span.start, span.stop)
        backend = by_transformers(task.backend, decoder.attention(index), mask)
        step = replace(step, backend=backend)
    decoder.advance(step, hidden, number)
    scopes.retag(hidden[number], "Hidden")


class _Chunks:
    """Keys and values of one layer as a list of chunks, and in one tensor."""

    def __init__(self) -> None:
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        #: Of the chunk that runs: what it wrote, and what attention reads.
        self._newest: tuple[torch.Tensor, torch.Tensor] | None = None
        self._all: tuple[torch.Tensor, torch.Tensor] | None = None

    def write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """As :class:`tidekv.models.stock.Store` has it."""
        self._newest = keys, values
        with scopes.component("KV_res/full"):
            self._keys.append(keys.contiguous())
            self._values.append(values.contiguous())
            for piece in (self._keys[-1], self._values[-1]):
                scopes.retag(piece, "KV_res/full")  # of a single head it is what was written
            self._all = torch.cat(self._keys, dim=2), torch.cat(self._values, dim=2)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As :class:`tidekv.models.stock.Store` has it."""
        assert self._all is not None
        return self._all

    def end_chunk(self) -> None:
        """Forget what only the chunk that ran needed."""
        self._newest = self._all = None
