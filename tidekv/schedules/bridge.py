"""Where the prompt's hidden states live between two layers: one tensor, overwritten in place."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch

from memtrace import scopes
from tidekv.models import Span
from tidekv.schedules.base import Task


class Bridge(Protocol):
    """Hidden states of the prompt, begun with its embeddings."""

    #: Its chunks.
    spans: list[Span]

    def chunk(self, number: int) -> Any:
        """A context manager: (B, C, d) on the device, and what is written to it stays."""

    def last_row(self) -> torch.Tensor:
        """A copy of the last row, (B, 1, d), on the device."""


class DeviceBridge:
    """All of it on the device."""

    def __init__(self, task: Task, spans: list[Span]) -> None:
        self.spans = spans
        embedded = _embeddings(task, spans)
        with scopes.component("Hidden"):
            if len(spans) == 1:
                self._all = next(embedded)
                return
            self._all = torch.empty(
                *task.input_ids.shape,
                task.decoder.model.config.hidden_size,
                dtype=task.decoder.dtype,
                device=task.decoder.device,
            )
        with scopes.component("Act"):  # a chunk's embeddings, on their way
            for span in spans:
                self._all[:, span.start : span.stop] = next(embedded)

    @contextmanager
    def chunk(self, number: int) -> Iterator[torch.Tensor]:
        """As :class:`Bridge` has it."""
        span = self.spans[number]
        yield self._all[:, span.start : span.stop]

    def last_row(self) -> torch.Tensor:
        """As :class:`Bridge` has it."""
        with scopes.component("Hidden"):
            return self._all[:, -1:].clone()


class HostBridge:
    """On the host, and two chunks on the device: one that runs, one that comes or goes."""

    def __init__(self, task: Task, spans: list[Span]) -> None:
        self.spans = spans
        device = task.decoder.device
        embedded = _embeddings(task, spans)
        on_gpu = device.type == "cuda"
        self._copies = torch.cuda.Stream(device) if on_gpu else None
        #: By slot: its chunk has arrived.
        self._arrived: list[Any] = [None, None]
        with scopes.component("Hidden"):
            first = next(embedded)
            batch, rows, width = first.shape
            self._host = torch.empty(
                batch, task.prompt_tokens, width, dtype=first.dtype, pin_memory=on_gpu
            )
            self._slots = [first, torch.empty_like(first)][: len(spans)]
            self._host[:, :rows] = first
            for span in spans[1:]:
                self._host[:, span.start : span.stop] = next(embedded)

    @contextmanager
    def chunk(self, number: int) -> Iterator[torch.Tensor]:
        """As :class:`Bridge` has it."""
        if number == 0:
            self._fetch(0)
        if number + 1 < len(self.spans):
            self._fetch(number + 1)
        if self._copies is not None:
            torch.cuda.current_stream().wait_event(self._arrived[number % 2])
        hidden = self._slot(number)
        yield hidden
        # Copies run one after the other, so the slot is not filled again before this one has left.
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream())
        with self._copying():
            self._rows(number).copy_(hidden, non_blocking=True)

    def last_row(self) -> torch.Tensor:
        """As :class:`Bridge` has it."""
        if self._copies is not None:
            self._copies.synchronize()
        with scopes.component("Hidden"):
            return self._host[:, -1:].to(self._slots[0].device, copy=True)

    def _fetch(self, number: int) -> None:
        with self._copying():
            self._slot(number).copy_(self._rows(number), non_blocking=True)
        if self._copies is not None:
            self._arrived[number % 2] = self._copies.record_event()

    def _copying(self) -> Any:
        return nullcontext() if self._copies is None else torch.cuda.stream(self._copies)

    def _rows(self, number: int) -> torch.Tensor:
        span = self.spans[number]
        return self._host[:, span.start : span.stop]

    def _slot(self, number: int) -> torch.Tensor:
        span = self.spans[number]
        return self._slots[number % 2][:, : span.stop - span.start]


def _embeddings(task: Task, spans: list[Span]) -> Iterator[torch.Tensor]:
    """Of each chunk, (B, C, d), on the device."""
    for span in spans:
        yield task.decoder.embed(task.input_ids[:, span.start : span.stop])
