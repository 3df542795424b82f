"""Scoring takes the same workspace, however long the prompt is."""

import pytest
import torch
from scoring import WINDOW, scores


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(4, WINDOW, 64, generator=generator)
    return queries, torch.randn(4, tokens, 64, generator=generator)


@pytest.mark.memory_budget(Temp="2 MiB", phase="score")
@pytest.mark.parametrize("tokens", [1024, 4096, 16384])
def test_workspace(tokens: int) -> None:
    scores(*inputs(tokens))


def test_values() -> None:
    queries, keys = inputs(2048)
    expected = (queries @ keys.mT * 64**-0.5).softmax(-1).sum(1)
    torch.testing.assert_close(scores(queries, keys), expected)


@pytest.mark.memory_plateau(requests=20, slope="1 KiB/request")
def test_nothing_is_kept() -> None:
    scores(*inputs(1024))
