"""The baseline: the model's own forward over the whole prompt, each layer compressed at its end.

This is what SnapKV implementations on transformers do, so its memory is what their users get: the
prompt's hidden states and embeddings are held by the model's code, the MLP runs at full length.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from memtrace import scopes
from tidekv.attention import pinned, transformers_name
from tidekv.caches import CompactCache
from tidekv.compat import cache_argument
from tidekv.errors import InfeasibleError
from tidekv.models import Span, StockDecoder
from tidekv.schedules.base import Filled, Observer, Schedule, Task, end_layer
from tidekv.selectors.base import Selection
from tidekv.shapes import groups_efficiently


@dataclass(frozen=True)
class WholePrompt(Schedule):
    """The model's own forward over the whole prompt, each layer compressed at its end.

    Attributes:
        mlp_rows: rows that the MLP takes at a time, as in MST (Luo et al. 2024, Mini-Sequence
            Transformer, whose default is max(4096 / batch, 1024)); its pieces are written into
            one output, where the authors' code concatenates them. None: all at once.
    """

    mlp_rows: int | None = None

    def check(self) -> None:
        """As :class:`Schedule` has it."""
        super().check()
        if self.mlp_rows is not None and self.mlp_rows < 1:
            raise InfeasibleError(f"mlp_rows must be at least 1 row, not {self.mlp_rows}.")

    def run(self, task: Task) -> Filled:
        """As :class:`Schedule` has it."""
        model = task.decoder.model
        cache = task.cache
        kept: list[Selection] = []
        with ExitStack() as stack:
            stack.enter_context(_attention(task.decoder, task.backend.name))
            for handle in (*_tag_components(task), *_compress_layers(task, cache, kept)):
                stack.callback(handle.remove)
            if self.mlp_rows is not None:
                for layer in task.decoder.layers:
                    stack.enter_context(_in_pieces(layer.mlp, self.mlp_rows))
            # What the forward makes outside of every module: positions and causal masks.
            stack.enter_context(scopes.component("backend"))
            output = model(
                input_ids=task.input_ids,
                use_cache=True,
                logits_to_keep=1,
                **{cache_argument(model): cache},
            )
        return Filled(cache, output.logits[:, -1], kept)


@contextmanager
def _attention(decoder: StockDecoder, attention: str) -> Iterator[None]:
    """Run the model's own attention code with this backend."""
    model = decoder.model
    grouped = decoder.kv_heads < decoder.query_heads
    if attention == "sdpa_efficient" and grouped and not groups_efficiently():
        raise InfeasibleError(
            "PyTorch's memory-efficient attention takes no fewer KV heads than query heads before "
            "torch 2.14; use attention='sdpa', or another schedule."
        )
    before = model.config._attn_implementation
    name = transformers_name(attention)
    try:
        if name != before:
            model.set_attn_implementation(name)
    except ValueError as error:
        raise InfeasibleError(
            f"transformers has no attention {name} for {type(model).__name__}, whose own code "
            "whole_prompt runs; use attention='eager', or another schedule."
        ) from error
    try:
        with pinned(attention) if name == "sdpa" else nullcontext():
            yield
    finally:
        if name != before:
            model.set_attn_implementation(before)


@contextmanager
def _in_pieces(mlp: nn.Module, rows: int) -> Iterator[None]:
    """Run a module on some rows of its input (B, S, d) at a time."""
    plain = mlp.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(x)
        for start in range(0, x.shape[1], rows):
            output[:, start : start + rows] = plain(x[:, start : start + rows])
        return output

    mlp.forward = forward
    try:
        yield
    finally:
        del mlp.forward


def _compress_layers(
    task: Task, cache: CompactCache, kept: list[Selection]
) -> list[RemovableHandle]:
    def at_end(index: int) -> RemovableHandle:
        def compress_layer(module: Any, args: Any, kwargs: dict[str, Any], _: Any) -> None:
            if running:  # it asks for its queries
                return
            stored: Any = cache.layers[index]
            observer = Observer(task)
            running.append(index)
            try:
                with scopes.component("Temp"):
                    _watch_queries(task, index, observer, stored, module, args, kwargs)
            finally:
                running.pop()
            end_layer(task, cache, observer.end(index, stored.keys, stored.values), kept)

        handle: RemovableHandle = task.decoder.attention(index).register_forward_hook(
            compress_layer, with_kwargs=True
        )
        return handle

    running: list[int] = []
    return [at_end(index) for index in range(task.last_layer + 1)]


class _Stored:
    """The keys and values of a layer that ran, in place of a store."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """They are there already."""

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As :class:`tidekv.models.stock.Store` has it."""
        return self._layer.keys, self._layer.values


def _watch_queries(
    task: Task,
    index: int,
    observer: Observer,
    stored: Any,
    module: Any,
    args: Any,
    kwargs: dict[str, Any],
) -> None:
    """Let ``observer`` see the queries of the last rows, which the attention module had."""
    total = task.prompt_tokens
    rows = total if observer.query_rows is None else observer.query_rows
    rows = max(rows, observer.input_rows)
    if rows == 0 or task.choice is None:
        return
    normed = (args[0] if args else kwargs["hidden_states"])[:, -rows:]
    observer.inputs(index, normed)
    if observer.query_rows == 0:
        return
    span = Span(total - normed.shape[1], total, total)
    step = task.step(index, span, _Stored(stored), observer)
    task.decoder.queries(step, module, normed, kwargs)


def _tag_components(task: Task) -> Iterator[RemovableHandle]:
    """Layer scopes and components for what the stock forward allocates."""
    decoder = task.decoder
    yield from _within(decoder.base.get_input_embeddings(), lambda: scopes.component("Hidden"))
    yield from _within(decoder.base.rotary_emb, lambda: scopes.component("Act"))
    yield from _within(decoder.final_norm, lambda: scopes.component("Act"))
    yield from _within(decoder.model.get_output_embeddings(), lambda: scopes.component("Temp"))
    for index, layer in enumerate(decoder.layers):
        yield from _within(
            layer, functools.partial(scopes.layer, index), lambda: scopes.component("Act")
        )
        yield layer.register_forward_hook(_output_is_hidden)


def _output_is_hidden(_: nn.Module, __: Any, output: Any) -> None:
    # A bare tensor from transformers 5 on, a tuple before.
    scopes.retag(output if isinstance(output, torch.Tensor) else output[0], "Hidden")


def _within(
    module: nn.Module, *open_scopes: Callable[[], AbstractContextManager[None]]
) -> Iterator[RemovableHandle]:
    """Run every call of ``module`` inside these scopes, the first outermost, also if it raises."""
    entered = ExitStack()

    def before(*_: Any) -> None:
        for open_scope in open_scopes:
            entered.enter_context(open_scope())

    def after(*_: Any) -> None:
        entered.close()

    yield module.register_forward_pre_hook(before)
    yield module.register_forward_hook(after, always_call=True)
