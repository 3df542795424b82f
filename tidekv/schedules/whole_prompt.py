"""The baseline: the model's own forward over the whole prompt, each layer compressed at its end.

This is what SnapKV implementations on transformers do, so its memory is what their users get: the
prompt's hidden states and embeddings are held by the model's code, the MLP runs at full length.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.hooks import RemovableHandle

from memtrace import scopes
from tidekv.attention import transformers_name
from tidekv.cache import CompactCache
from tidekv.compat import cache_argument
from tidekv.schedules.base import Filled, Task, end_layer
from tidekv.selectors.base import LayerEnd


def whole_prompt(task: Task) -> Filled:
    """Prefill with the stock forward. See the module."""
    model = task.decoder.model
    cache = CompactCache(len(task.decoder.layers))
    indices: list[torch.Tensor] = []
    with ExitStack() as stack:
        stack.enter_context(_attention(model, task.attention))
        for handle in (*_tag_components(task), *_compress_layers(task, cache, indices)):
            stack.callback(handle.remove)
        # What the forward makes outside of every module: positions and causal masks.
        with scopes.component("backend"):
            output = model(
                input_ids=task.input_ids,
                use_cache=True,
                logits_to_keep=1,
                **{cache_argument(model): cache},
            )
    return Filled(cache, output.logits[:, -1], indices)


@contextmanager
def _attention(model: Any, attention: str) -> Iterator[None]:
    """Run the model's own attention code with this backend."""
    before = model.config._attn_implementation
    name = transformers_name(attention)
    if name != before:
        model.set_attn_implementation(name)
    try:
        with ExitStack() as stack:
            if name != attention:
                stack.enter_context(sdpa_kernel(SDPBackend.FLASH_ATTENTION))
            yield
    finally:
        if name != before:
            model.set_attn_implementation(before)


def _compress_layers(
    task: Task, cache: CompactCache, indices: list[torch.Tensor]
) -> list[RemovableHandle]:
    def at_end(index: int, layer: Any) -> RemovableHandle:
        def compress_layer(_: nn.Module, __: Any, kwargs: dict[str, Any], ___: Any) -> None:
            stored: Any = cache.layers[index]
            tail = slice(-task.observed_rows, None)
            with scopes.component("Temp"):
                cos, sin = (part[:, tail] for part in kwargs["position_embeddings"])
                queries = task.decoder.queries(layer, kwargs["hidden_states"][:, tail], (cos, sin))
            scaling = task.decoder.scaling(layer)
            end = LayerEnd(index, queries, stored.keys, stored.values, scaling)
            indices.extend(end_layer(cache, end, task))

        handle: RemovableHandle = layer.self_attn.register_forward_hook(
            compress_layer, with_kwargs=True
        )
        return handle

    return [at_end(index, layer) for index, layer in enumerate(task.decoder.layers)]


def _tag_components(task: Task) -> Iterator[RemovableHandle]:
    """Layer scopes and components for what the stock forward allocates."""
    model = task.decoder.model
    yield from _within(model.model.embed_tokens, lambda: scopes.component("Hidden"))
    yield from _within(model.model.rotary_emb, lambda: scopes.component("Act"))
    yield from _within(model.model.norm, lambda: scopes.component("Act"))
    yield from _within(model.lm_head, lambda: scopes.component("Temp"))
    for index, layer in enumerate(task.decoder.layers):
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
