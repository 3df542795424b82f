"""Choices among unknown scores: the stated placeholders that let decoding go its way.

The rule (``RULE`` says it to the user): of n candidates, the one at 0.618 n is chosen, and those
after it where several are. So a choice among a vocabulary, or among the vocabularies of several
beams at once, is an ordinary token: the special ones stand at either end. It is wrong where a token
in that place ends a sequence; the text then ends earlier than another one would have.

- ``argmax``, ``max(dim)``, ``multinomial``, ``topk`` and ``sort`` give such places, each row the
  same. So a draft of assisted decoding is always accepted.
  More than 4,096 places in three dimensions are rows of a cache by head, not tokens: unknown.
- ``topk`` among fewer than 1,024 candidates serves the rows in turn, as a balanced router of a
  mixture of experts would.
- The scores that ``topk`` returns, and those gathered at what ``multinomial`` drew, are the ranks
  -1, -2, …: beam search compares them, so there has to be an order. Other scores stay unknown.
- Of known probabilities ``multinomial`` takes the most likely: what chance would take isn't known.
"""

from typing import Any

import torch
from torch import Tensor

from memtrace.virtual_gpu.values_known import UNKNOWN, Known
from memtrace.virtual_gpu.values_mirrors import ELEMENTS
from memtrace.virtual_gpu.values_rules import Rule

RULE = (
    "of n candidates with unknown scores the one at 0.618 n is chosen and those after it; top-k of "
    "fewer than 1024 serves the rows in turn; scores of top-k and of drawn tokens are their ranks; "
    "a draft is always confident and accepted"
)

_FIRST = 0.618
_MOST = 4096
_ROUTER = 1024


def choose(known: Known, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator that picks places by scores."""
    out = func._op(*args, **kwargs)
    value = known.compute(rule, func, args, kwargs)
    if value is not UNKNOWN:
        known.bind(out, value)
    elif rule.name == "gather":
        if known.mirrors.chosen(args[2]) and out.is_floating_point():
            known.bind(out, _ranks(out, args[1], -1))
    else:
        _place(known, rule, args, kwargs, out)
    return out


def _place(known: Known, rule: Rule, args: Any, kwargs: Any, out: Any) -> None:
    scores: Tensor = args[0]
    places: Tensor = out if isinstance(out, Tensor) else out[1]
    if not places.numel() or places.numel() > ELEMENTS or not places.is_cuda:
        return
    dim = _dim(rule, args, kwargs)
    count = scores.numel() if dim is None else scores.shape[dim] if scores.dim() else 1
    in_turn = rule.name == "topk" and count < _ROUTER
    if places.dim() > 2 and places.numel() > _MOST and not in_turn:
        return
    known.choices["token choices"] += 1
    if rule.name == "multinomial":
        likely = known.value(scores)
        if likely is UNKNOWN:
            chosen = _consecutive(places, -1, scores.shape[-1])
        else:
            chosen = _likeliest(likely, places.shape[-1])
        known.mirrors.bind(places, chosen, chosen=True)
        return
    chooses_many = rule.name in ("topk", "sort")
    known.mirrors.bind(
        places, _consecutive(places, dim if chooses_many else None, count, in_turn=in_turn)
    )
    if rule.name == "topk" and out[0].is_floating_point():
        largest = args[3] if len(args) > 3 else kwargs.get("largest", True)
        known.mirrors.bind(out[0], _ranks(out[0], dim, -1 if largest else 1))


def _dim(rule: Rule, args: Any, kwargs: Any) -> int | None:
    """The dimension that is chosen along; None: all at once."""
    place, default = {
        "argmax": (1, None),
        "max": (1, None),
        "topk": (2, -1),
        "multinomial": (len(args), -1),
        "sort": (2 if "stable" in str(rule.operator) else 1, -1),
    }[rule.name]
    dim: int | None = args[place] if len(args) > place else kwargs.get("dim", default)
    return dim


def _consecutive(like: Tensor, dim: int | None, count: int, *, in_turn: bool = False) -> Tensor:
    """Places among ``count`` in the shape of ``like``, consecutive along ``dim``."""
    first = int(_FIRST * count)
    if dim is None or not like.dim():
        return torch.full((), first, dtype=torch.int64, device="cpu").expand(like.shape)
    chosen = like.shape[dim]
    shape = like.transpose(dim, -1).shape
    places = torch.arange(first, first + chosen, device="cpu")
    if in_turn:
        turns = torch.arange(0, like.numel(), chosen, device="cpu")
        places = (turns[:, None] + places).view(shape)
    return places.remainder_(count).expand(shape).transpose(dim, -1)


def _ranks(like: Tensor, dim: int | None, sign: int) -> Tensor:
    """sign x 1, 2, … along ``dim``, in the shape of ``like``."""
    ranks = torch.ones(like.shape, dtype=torch.float32, device="cpu")
    if like.dim():
        ranks = ranks.cumsum(-1 if dim is None else dim)
    return (sign * ranks).to(like.dtype)


def _likeliest(probabilities: Tensor, samples: int) -> Tensor:
    """The most likely places; the last one again where there are fewer than ``samples``."""
    found = probabilities.float().topk(min(samples, probabilities.shape[-1]), dim=-1).indices
    missing = samples - found.shape[-1]
    return torch.cat((found, found[..., -1:].expand(*found.shape[:-1], missing)), -1)
