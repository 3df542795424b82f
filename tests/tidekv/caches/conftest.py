"""Which rows are kept, and models in both attention implementations."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.tidekv.caches.reference import Kept


@pytest.fixture(params=["sdpa", "eager"])
def stock(request: Any, tiny: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """``tiny``, with either of transformers' attention codes."""
    made = []

    def get(family: str = "llama", **overrides: Any) -> Any:
        model = tiny(family, **overrides)
        made.append((model, model.config._attn_implementation))
        model.set_attn_implementation(request.param)
        return model

    yield get
    for model, before in reversed(made):
        model.set_attn_implementation(before)


def keep(counts: torch.Tensor, rows: int, seed: int = 0) -> torch.Tensor:
    """(B, Hkv, rows), bool: as many of each head as ``counts`` (B, Hkv) says, at random."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(*counts.shape, rows, generator=generator).argsort(-1).argsort(-1)
    return order < counts.unsqueeze(-1)


@pytest.fixture
def evenly() -> Callable[..., Kept]:
    """``evenly(rows, 5, 3, 4, batch=1)``: 5 rows in each head of layer 0, 3 of layer 1, …"""

    def make(rows: int, *by_layer: int, batch: int = 1) -> Kept:
        return [
            keep(torch.full((batch, 2), count), rows, seed) for seed, count in enumerate(by_layer)
        ]

    return make


@pytest.fixture
def unevenly() -> Callable[..., Kept]:
    """``unevenly(rows, batch=1)``: heads of 3 layers keep other numbers of rows, one none."""

    def make(rows: int, batch: int = 1) -> Kept:
        generator = torch.Generator().manual_seed(rows)
        counts = torch.randint(1, rows, (3, batch, 2), generator=generator)
        counts[0, -1, -1] = 0
        counts[1, 0, 0] = rows
        return [keep(count, rows, seed) for seed, count in enumerate(counts)]

    return make
