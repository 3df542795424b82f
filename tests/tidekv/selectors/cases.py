"""Selectors and layers that the tests draw."""

import dataclasses
from typing import Any

import torch
from hypothesis import strategies as st

from tests.tidekv.selectors.naive import Kept
from tidekv.selectors import (
    CAKE,
    H2O,
    TOVA,
    AdaKV,
    ChunkKV,
    KeyDiff,
    Knorm,
    LayerEnd,
    PyramidKV,
    Random,
    Recent,
    Selection,
    Selector,
    SnapKV,
    StreamingLLM,
)

_blocks = st.sampled_from([1, 2, 5, 16, 200])
_odd = st.sampled_from([1, 3, 5, 7])
_aggregate = st.sampled_from(["mean", "max"])
_snapkv: dict[str, Any] = {
    "window": st.integers(1, 6),
    "kernel_size": _odd,
    "pooling": st.sampled_from(["max", "avg"]),
    "sinks": st.integers(0, 3),
    "aggregate": _aggregate,
    "aggregate_first": st.booleans(),
    "block_size": _blocks,
}

#: Selectors with drawn parameters.
PARAMETERS: dict[type[Selector], st.SearchStrategy[Any]] = {
    SnapKV: st.builds(SnapKV, **_snapkv),
    PyramidKV: st.builds(PyramidKV, beta=st.sampled_from([1, 2.5, 4, 20]), **_snapkv),
    AdaKV: st.builds(AdaKV, safeguard=st.sampled_from([0.0, 0.2, 0.5, 1.0]), **_snapkv),
    ChunkKV: st.builds(
        ChunkKV,
        window=st.integers(1, 6),
        chunk=st.integers(1, 7),
        shared=st.booleans(),
        reuse=st.integers(1, 3),
        aggregate=_aggregate,
        aggregate_first=st.booleans(),
        block_size=_blocks,
    ),
    CAKE: st.builds(
        CAKE,
        window=st.integers(2, 6),
        gamma=st.sampled_from([0.0, 5.0, 200.0]),
        tau1=st.sampled_from([0.8, 1.0, 1.6]),
        tau2=st.sampled_from([0.4, 1.0]),
        kernel_size=_odd,
        aggregate=_aggregate,
        aggregate_first=st.booleans(),
        block_size=_blocks,
    ),
    H2O: st.builds(
        H2O,
        recent_share=st.sampled_from([0.0, 0.5, 0.7, 1.0]),
        aggregate=_aggregate,
        block_size=_blocks,
    ),
    TOVA: st.builds(TOVA, per_head=st.booleans(), aggregate=_aggregate, block_size=_blocks),
    KeyDiff: st.builds(KeyDiff, recent=st.integers(0, 3), block_size=_blocks),
    Knorm: st.just(Knorm()),
    StreamingLLM: st.builds(StreamingLLM, sinks=st.integers(0, 4)),
    Recent: st.just(Recent()),
    Random: st.builds(Random, seed=st.integers(0, 2**32 - 1)),
}


def random_layer(
    rows: int,
    queries: int,
    *,
    seed: int,
    batch: int = 1,
    kv_heads: int = 2,
    group: int = 2,
    index: int = 0,
    softcap: float | None = None,
) -> LayerEnd:
    """In float64, so that rounding can't swap two scores."""
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int, count: int) -> torch.Tensor:
        return torch.randn(batch, heads, count, 4, generator=generator, dtype=torch.float64)

    keys = normal(kv_heads, rows)
    asked = normal(kv_heads * group, queries)
    return LayerEnd(index, 2 * asked, keys, normal(kv_heads, rows), 0.5, softcap)


def tied_layer(levels: list[int], queries: int, *, batch: int, kv_heads: int) -> LayerEnd:
    """Keys of a few kinds, the same in all heads, so that scores tie exactly."""
    kinds = torch.tensor([[1, 0, 0, 1], [1, 1, 0, 1], [2, 2, 0, 2]], dtype=torch.float64)
    keys = kinds[levels].expand(batch, kv_heads, -1, -1)
    asked = torch.ones(batch, 2 * kv_heads, queries, 4, dtype=torch.float64)
    return LayerEnd(0, asked, keys, keys, 1.0)


@st.composite
def problems(draw: st.DrawFn, kind: type[Selector]) -> tuple[Selector, LayerEnd, int]:
    """A selector, a layer and how many rows are kept of it."""
    selector = draw(PARAMETERS[kind])
    tied = draw(st.booleans())
    if tied:
        selector = _without_rounding(selector)
    # Two keys differ from their mean alike, up to rounding.
    least = max(selector.mandatory, 3 if isinstance(selector, KeyDiff) else 1)
    length = draw(st.integers(least, least + 40))
    queries = length if selector.every_query else selector.window
    batch, kv_heads, group = (draw(st.integers(1, 2)) for _ in range(3))
    if tied:
        levels = draw(st.lists(st.integers(0, 2), min_size=length, max_size=length))
        if isinstance(selector, ChunkKV):
            kv_heads, levels = 1, [levels[row // selector.chunk] for row in range(length)]
        if isinstance(selector, KeyDiff):
            layer = random_layer(length, 0, seed=length, batch=batch, kv_heads=kv_heads)
            layer.keys[:, :, [level == 0 for level in levels]] = 1.0
        else:
            layer = tied_layer(levels, queries, batch=batch, kv_heads=kv_heads)
    else:
        layer = random_layer(
            length,
            queries,
            seed=draw(st.integers(0, 2**31)),
            batch=batch,
            kv_heads=kv_heads,
            group=group,
            softcap=draw(st.sampled_from([None, 1.5])),
        )
    return selector, layer, draw(st.integers(least, length))


def _without_rounding(selector: Selector) -> Selector:
    """One whose scores of equal keys are equal numbers: sums of two, which have no order."""
    fields = {field.name for field in dataclasses.fields(selector)}
    if "window" in fields:
        window = 1 if isinstance(selector, ChunkKV) else min(selector.window, 2)
        selector = dataclasses.replace(selector, window=window)
    if "kernel_size" in fields and getattr(selector, "pooling", "avg") == "avg":
        selector = dataclasses.replace(selector, kernel_size=1)
    return selector


def as_lists(selection: Selection, heads: int) -> Kept:
    """Positions by prompt and KV head."""
    if selection.counts is None:
        return selection.indices.tolist()
    parts = selection.indices.split(selection.counts.flatten().tolist())
    lists = [part.tolist() for part in parts]
    return [lists[start : start + heads] for start in range(0, len(lists), heads)]
