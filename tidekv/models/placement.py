"""Weights that live elsewhere and visit the device where the prompt is computed.

A layer-major prefill needs each layer's weights once per prompt, whatever the prompt's length, so
they can stream from the host: two slots on the device, one for the layer that runs and one that the
next is copied into meanwhile. (Copies overlap with computing only from pinned memory.)
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import nn

from memtrace import scopes


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers of a module."""
    return list(chain(module.parameters(), module.buffers()))


@contextmanager
def visiting(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Have what a module holds elsewhere on ``device`` for the length of a ``with`` block."""
    absent = [(one, one.data) for one in tensors_of(module) if one.device != device]
    try:
        with scopes.component("model"):
            for one, home in absent:
                one.data = home.to(device)
        yield
    finally:
        for one, home in absent:
            one.data = home


class Slots:
    """The layers of a model, brought to a device one after the other.

    Args:
        layers: used in this order, each once per pass, by :meth:`layer`.
        device: where they run.
    """

    def __init__(self, layers: Sequence[nn.Module], device: torch.device) -> None:
        self._layers = layers
        self._device = device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._slots: list[list[torch.Tensor]] = [[], []]
        #: Copies into a slot, and computing with it, have ended.
        self._copied: list[Any] = [None, None]
        self._used: list[Any] = [None, None]

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """Have layer ``index`` on the device, and the next one on its way."""
        if index == 0:
            self._fetch(0)
        slot = index % 2
        if index + 1 < len(self._layers):
            self._fetch(index + 1)
        if self._copies is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied[slot])
        tensors = tensors_of(self._layers[index])
        homes = [one.data for one in tensors]
        try:
            for one, copy in zip(tensors, self._slots[slot], strict=True):
                one.data = copy
            yield
        finally:
            for one, home in zip(tensors, homes, strict=True):
                one.data = home
            if self._copies is not None:
                self._used[slot] = torch.cuda.current_stream(self._device).record_event()

    def _fetch(self, index: int) -> None:
        """Begin to copy a layer into the slot that the one before the last has left."""
        slot = index % 2
        homes = tensors_of(self._layers[index])
        held = self._slots[slot]
        if [one.shape for one in held] != [one.shape for one in homes]:
            held.clear()
            with scopes.component("model"):
                held.extend(torch.empty_like(one, device=self._device) for one in homes)
        copies = self._copies
        if copies is not None and self._used[slot] is not None:
            copies.wait_event(self._used[slot])
        with nullcontext() if copies is None else torch.cuda.stream(copies):
            for one, home in zip(held, homes, strict=True):
                one.copy_(home, non_blocking=True)
        if copies is not None:
            self._copied[slot] = copies.record_event()
