"""What a selector allocates doesn't grow with the prompt, but for four bytes per row and head."""

import pytest
import torch

from tests.tidekv.live_bytes import LiveBytes
from tidekv.selectors import (
    CAKE,
    H2O,
    TOVA,
    AdaKV,
    ChunkKV,
    KeyDiff,
    Knorm,
    LayerEnd,
    Random,
    Request,
    Selector,
    SnapKV,
)

SHORT, LONG, ROWS = 6144, 12288, 256


def peak(selector: Selector, length: int) -> int:
    """Bytes that choosing ROWS rows makes at most; a window of an 8B model's layer, H2O's smaller.

    H2O is shown the last 96 queries, each part of which costs the same.
    """
    heads, kv_heads, size = (4, 2, 16) if selector.every_query else (32, 8, 128)
    queries = torch.randn(1, heads, 96 if selector.every_query else selector.window, size)
    keys = torch.randn(1, kv_heads, length, size)
    choice = selector.begin(Request(1, length, ROWS))
    with torch.no_grad(), LiveBytes(queries, keys) as live:
        if selector.every_query:
            choice.observe(0, queries, keys, scaling=size**-0.5)
        choice.select(LayerEnd(0, queries, keys, keys, size**-0.5))
    return live.peak


@pytest.mark.parametrize(
    "selector",
    [
        SnapKV(),
        SnapKV(aggregate_first=False),
        AdaKV(),
        ChunkKV(),
        ChunkKV(aggregate_first=False),
        CAKE(),
        CAKE(aggregate="max", aggregate_first=False),
        H2O(),
        H2O(aggregate="max"),
        TOVA(),
        KeyDiff(),
        Knorm(),
        Random(),
    ],
    ids=lambda selector: type(selector).__name__,
)
def test_a_longer_prompt_costs_its_scores_alone(selector):
    scores = 2 if selector.every_query else 8
    if selector == H2O(aggregate="max"):  # of each query head, and their maximum
        scores += 4
    assert peak(selector, LONG) - peak(selector, SHORT) <= 4 * scores * (LONG - SHORT)
