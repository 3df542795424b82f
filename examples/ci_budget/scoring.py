"""Which rows of a KV cache the last tokens of a prompt look at most."""

import torch

from memtrace import scopes

WINDOW = 32  # rows of the observation window
BLOCK = 512  # tokens that are scored at a time


def scores(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The attention that each token gets from the window, summed up.

    Args:
        queries: (heads, WINDOW, dim).
        keys: (heads, tokens, dim).

    Returns:
        (heads, tokens) float32.
    """
    heads, tokens, dim = keys.shape
    with scopes.phase("score"), scopes.component("Temp"):
        scaled = queries * dim**-0.5
        # Two passes, so that no more than a block of probabilities is ever there.
        total = torch.full((heads, WINDOW), -torch.inf)
        for start in range(0, tokens, BLOCK):
            logits = scaled @ keys[:, start : start + BLOCK].mT
            total = torch.logaddexp(total, logits.logsumexp(-1))
        found = torch.empty(heads, tokens)
        for start in range(0, tokens, BLOCK):
            logits = scaled @ keys[:, start : start + BLOCK].mT
            found[:, start : start + BLOCK] = (logits - total[..., None]).exp_().sum(1)
    scopes.retag(found, "other")
    return found
