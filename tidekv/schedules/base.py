"""What every schedule is given and gives back, and what happens at a layer's end."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from memtrace import scopes
from tidekv import options
from tidekv.attention import Backend
from tidekv.caches import CompactCache, rows_of
from tidekv.errors import InfeasibleError
from tidekv.models import Span, StockDecoder
from tidekv.models.stock import Step, Store, Watch
from tidekv.selectors.base import Choice, LayerEnd, Selection


@dataclass(frozen=True)
class Task:
    """One checked prefill.

    ``input_ids`` is (B, S); ``choice`` None keeps every row; ``cache`` holds nothing yet.
    """

    decoder: StockDecoder
    input_ids: torch.Tensor
    choice: Choice | None
    backend: Backend
    cache: CompactCache
    keep_indices: bool
    on_layer: Callable[[int], None] | None

    @property
    def prompt_tokens(self) -> int:
        return self.input_ids.shape[1]

    @property
    def last_layer(self) -> int:
        return len(self.decoder.layers) - 1

    def spans(self, chunk_size: int) -> list[Span]:
        """The prompt in chunks."""
        total = self.prompt_tokens
        return [
            Span(start, min(start + chunk_size, total), total)
            for start in range(0, total, chunk_size)
        ]

    def empty(self, heads: int, rows: int, *, on_host: bool = False) -> torch.Tensor:
        """(B, heads, rows, D), not initialised."""
        decoder = self.decoder
        shape = (self.input_ids.shape[0], heads, rows, decoder.head_dim)
        if on_host:
            pinned = decoder.device.type == "cuda"
            return torch.empty(shape, dtype=decoder.dtype, pin_memory=pinned)
        return torch.empty(shape, dtype=decoder.dtype, device=decoder.device)

    def step(self, index: int, span: Span, store: Store, watch: Watch) -> Step:
        """Layer ``index`` for one chunk."""
        return Step(index, span, store, watch, self.backend)


@dataclass(frozen=True)
class Filled:
    """A finished prefill: the cache, last logits (B, V), what was kept by layer if asked for."""

    cache: CompactCache
    logits: torch.Tensor
    kept: list[Selection] = field(default_factory=list)


class Schedule(ABC):
    """In which order chunks and layers advance; a frozen dataclass of the schedule's parameters."""

    #: Whether a selector sees each layer's whole prompt at once, as the methods define it.
    whole_layers: ClassVar[bool] = True
    #: Whether it means something without eviction.
    keeps_all: ClassVar[bool] = True
    #: What holds the rows where it isn't the device; None: whatever was asked for.
    cache_class: ClassVar[type[CompactCache] | None] = None

    def check(self) -> None:
        """
        Raises:
            InfeasibleError: parameters that can't be.
        """
        options.check(self)
        for name in ("chunk_size", "piece_rows"):
            value = getattr(self, name, 1)
            if value < 1:
                raise InfeasibleError(f"{name} must be at least 1 row, not {value}.")

    @abstractmethod
    def run(self, task: Task) -> Filled:
        """Read the prompt."""


class Buffer:
    """Keys and values of one layer, (B, Hkv, capacity, D) each, written from the front."""

    def __init__(self, task: Task, capacity: int, *, on_host: bool = False) -> None:
        with scopes.component("KV_res/full"):
            self.keys = task.empty(task.decoder.kv_heads, capacity, on_host=on_host)
            self.values = task.empty(task.decoder.kv_heads, capacity, on_host=on_host)
        self.rows = 0

    def write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """As :class:`tidekv.models.stock.Store` has it."""
        rows = slice(self.rows, self.rows + keys.shape[2])
        self.keys[:, :, rows] = keys
        self.values[:, :, rows] = values
        self.rows = rows.stop

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As :class:`tidekv.models.stock.Store` has it."""
        return self.keys[:, :, : self.rows], self.values[:, :, : self.rows]


class Tail:
    """The last rows of something that comes chunk by chunk."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer  # (…, rows, n)
        self._seen = 0

    def push(self, chunk: torch.Tensor) -> None:
        """Append (…, C, n)."""
        rows, new = self._buffer.shape[-2], chunk.shape[-2]
        if new < rows:
            self._buffer[..., :-new, :] = self._buffer[..., new:, :].clone()
        self._buffer[..., max(rows - new, 0) :, :] = chunk[..., -rows:, :]
        self._seen += new

    def rows(self) -> torch.Tensor:
        """The last rows that there are, up to the buffer's."""
        return self._buffer[..., max(self._buffer.shape[-2] - self._seen, 0) :, :]

    def clear(self) -> None:
        self._seen = 0


class Observer:
    """Collects of a running layer what the selector will read at its end."""

    def __init__(self, task: Task) -> None:
        self._task = task
        selector = task.choice.selector if task.choice else None
        self._every = selector is not None and selector.every_query
        self._window = selector.window if selector else 0
        #: As :class:`tidekv.models.stock.Watch` has it.
        self.query_rows = None if self._every else self._window
        self.input_rows = 0
        if selector is not None:
            self.input_rows = task.prompt_tokens if selector.every_input else selector.input_rows
        decoder = task.decoder
        with scopes.component("Temp"):
            self._queries = Tail(task.empty(decoder.query_heads, self._window))
            shape = (task.input_ids.shape[0], self.input_rows, decoder.model.config.hidden_size)
            self._inputs = Tail(torch.empty(shape, dtype=decoder.dtype, device=decoder.device))

    def queries(self, index: int, queries: torch.Tensor, store: Store) -> None:
        """As :class:`tidekv.models.stock.Watch` has it."""
        if self._window:
            self._queries.push(queries)
        if self._every and self._task.choice is not None:
            with scopes.component("Temp"), scopes.phase("score"):
                decoder = self._task.decoder
                with scopes.component("KV_res/full"):
                    keys = store.read()[0].to(queries.device)  # from the host, where they are there
                self._task.choice.observe(
                    index,
                    queries,
                    keys,
                    scaling=decoder.scaling(index),
                    softcap=decoder.softcap,
                )

    def inputs(self, _: int, normed: torch.Tensor) -> None:
        """As :class:`tidekv.models.stock.Watch` has it."""
        if self.input_rows:
            self._inputs.push(normed)

    def end(
        self, index: int, keys: torch.Tensor, values: torch.Tensor, stop: int | None = None
    ) -> LayerEnd:
        """The layer as the selector sees it, after row ``stop`` - 1; None: the prompt's last."""
        decoder, total = self._task.decoder, self._task.prompt_tokens
        stop = stop or total
        inputs = rope = rotary = None
        if self.input_rows:
            inputs, rotary = self._inputs.rows(), decoder.rotary
            rope = decoder.rope_table(Span(stop - inputs.shape[1], stop, total))
        return LayerEnd(
            index,
            self._queries.rows(),
            keys,
            values,
            decoder.scaling(index),
            decoder.softcap,
            decoder.attention(index),
            inputs,
            rope,
            rotary,
        )

    def clear(self) -> None:
        """Begin with another layer."""
        self._queries.clear()
        self._inputs.clear()


def end_layer(task: Task, filled: CompactCache, end: LayerEnd, kept: list[Selection]) -> None:
    """Move what is kept of a finished layer into the cache.

    Args:
        kept: what was kept of the layers before; follows if the task wants to know.
    """
    if task.choice is None:
        filled.layers[end.index].store(end.keys, end.values, dropped=0)
    else:
        selection = _evict(task, filled, end, task.choice, kept)
        if task.keep_indices:
            kept.append(selection)
    across = task.choice is not None and task.choice.selector.across_layers
    with scopes.phase("compress"):
        if not across:
            filled.layers[end.index].finish()
        elif end.index == task.last_layer:  # no layer's rows are final before
            for layer in filled.layers:
                layer.finish()
    if task.on_layer is not None:
        task.on_layer(end.index)


def _evict(
    task: Task, cache: CompactCache, end: LayerEnd, choice: Choice, kept: list[Selection]
) -> Selection:
    with scopes.component("Temp"):
        with scopes.phase("score"):
            selection = choice.select(end)
        with scopes.phase("compress"):
            _shrink(task, cache, choice, kept)  # first, which makes room for what is copied
            if selection.counts is None:
                with scopes.component("KV_res/compact"):
                    keys, values = rows_of(end.keys, end.values, selection.indices)
            else:
                keys, values = _flat(end, selection.indices, selection.counts)
    seen = end.keys.shape[2]
    layer = cache.layers[end.index]
    if selection.counts is None:
        layer.store(keys, values, dropped=seen - keys.shape[2])
    else:
        layer.store_flat(keys, values, selection.counts, prompt_tokens=seen, least=selection.least)
    return selection


def _shrink(task: Task, cache: CompactCache, choice: Choice, kept: list[Selection]) -> None:
    for index, rows in choice.shrink():
        cache.layers[index].shrink(rows)
        if task.keep_indices:
            kept[index] = Selection(kept[index].indices.gather(-1, rows))


def _flat(
    end: LayerEnd, indices: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (T,) of a layer whose heads keep ``counts`` (B, Hkv) of them, each (T, D)."""
    heads = torch.arange(counts.numel(), device=counts.device)
    head = heads.repeat_interleave(counts.flatten(), output_size=indices.numel())
    with scopes.component("KV_res/compact"):
        return end.keys.flatten(0, 1)[head, indices], end.values.flatten(0, 1)[head, indices]
