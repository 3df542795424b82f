"""What a selector is given at the end of a layer, and what it gives back.

Shapes: B batch, Hq query heads, Hkv KV heads, W window rows, S prompt rows, C chunk rows, K rows
kept, D head size, d hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tidekv import options
from tidekv.errors import InfeasibleError


@dataclass(frozen=True)
class Request:
    """One prefill, as far as a selector is concerned.

    Attributes:
        layers: of the model, N.
        prompt_tokens: S.
        rows: the budget: rows per layer and KV head; a method that spreads it unevenly keeps
            N·rows per KV head in all (or Hkv·rows in a layer).
        scoring: "blockwise" or "dense", see :mod:`tidekv.scoring`.
    """

    layers: int
    prompt_tokens: int
    rows: int
    scoring: str = "blockwise"


@dataclass(frozen=True)
class LayerEnd:
    """One layer whose keys and values are complete.

    Attributes:
        index: of the layer.
        queries: (B, Hq, W, D), the last W rows, rotated; W is the selector's ``window``.
        keys, values: (B, Hkv, S, D); keys are rotated.
        scaling: the factor on the attention logits.
        softcap: c of logits ← c·tanh(logits / c), after scaling (Gemma 2); None without one.
        attention: the model's own attention module.
        inputs: (B, n, d), what the last n rows of the attention module's input were, n =
            min(``input_rows``, S), or S for ``every_input``; None unless the selector asks for
            them.
        rope: (cos, sin), (1 or B, n, D) each, of the rows of ``inputs``; None without those.
        rotary: the model's own rotary embedding; None without inputs.
    """

    index: int
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scaling: float
    softcap: float | None = None
    attention: Any = None
    inputs: torch.Tensor | None = None
    rope: tuple[torch.Tensor, torch.Tensor] | None = None
    rotary: Any = None


@dataclass(frozen=True)
class Selection:
    """Rows that are kept of one layer, ascending for each KV head.

    Attributes:
        indices: (B, Hkv, K), int64; or, where heads keep unequal numbers, all of them one after
            the other, (B·Hkv·K,), the heads of the first prompt first.
        counts: (B, Hkv), int64 on the device: how many each head keeps; None if all keep K.
        least: how many each keeps at least.
    """

    indices: torch.Tensor
    counts: torch.Tensor | None = None
    least: int = 0

    def by_head(self) -> torch.Tensor | list[list[torch.Tensor]]:
        """``indices``, split into those of each head, by prompt, where heads differ in number."""
        if self.counts is None:
            return self.indices
        heads = iter(self.indices.split(self.counts.flatten().tolist()))
        return [[next(heads) for _ in prompt] for prompt in self.counts]


class Selector(ABC):
    """Chooses rows; a frozen dataclass whose fields are the method's parameters.

    It holds no state: what one prefill needs to remember is in the :class:`Choice` that
    :meth:`begin` returns.
    """

    #: How many of the last queries :meth:`select` reads; a field where it is a parameter.
    window: int = 0
    #: How many rows of the attention module's last inputs it reads.
    input_rows: int = 0
    #: Whether it reads all of them.
    every_input: bool = False
    #: Whether it must see every query of the prompt, through :meth:`Choice.observe`.
    every_query: ClassVar[bool] = False
    #: Whether the heads of a layer keep unequal numbers of rows.
    head_budgets: ClassVar[bool] = False
    #: Whether what is kept of a layer depends on other layers.
    across_layers: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """
        Raises:
            InfeasibleError: parameters that can't be.
        """
        options.check(self)

    @property
    def mandatory(self) -> int:
        """Rows that every KV head keeps whatever their score."""
        return 0

    def check(self, request: Request) -> None:
        """
        Raises:
            InfeasibleError: the prompt can't be cut to this budget.
        """
        name = type(self).__name__
        if self.mandatory > request.prompt_tokens:
            raise InfeasibleError(
                f"{name} always keeps {self.mandatory} rows, more than the prompt of "
                f"{request.prompt_tokens} tokens has; use a smaller window or fewer sinks, or "
                "selector=None."
            )
        if self.mandatory > request.rows:
            raise InfeasibleError(
                f"{name} always keeps {self.mandatory} rows, more than the budget of "
                f"{request.rows}; use a budget of at least {self.mandatory}."
            )

    def begin(self, request: Request) -> "Choice":
        """What chooses for one prefill."""
        return Choice(self, request)

    @abstractmethod
    def select(self, layer: LayerEnd, rows: int, scoring: str) -> torch.Tensor:
        """Exactly ``rows`` positions per KV head in ascending order: (B, Hkv, rows), int64."""


class Choice:
    """Chooses the rows of one prefill, layer by layer; this one needs no memory of its own."""

    def __init__(self, selector: Selector, request: Request) -> None:
        self.selector = selector
        self.request = request

    def observe(
        self,
        index: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        *,
        scaling: float,
        softcap: float | None = None,
    ) -> None:
        """See queries (B, Hq, C, D) of layer ``index`` while it runs, in the order of the prompt.

        Called only for a selector that must see ``every_query``.

        Args:
            keys: (B, Hkv, P, D), all up to the last of these queries.
            scaling: as in :class:`LayerEnd`.
            softcap: as in :class:`LayerEnd`.
        """

    def rows(self, index: int) -> int:
        """Rows that layer ``index`` may keep per KV head, known before the prefill."""
        return self.request.rows

    def select(self, layer: LayerEnd) -> Selection:
        """What is kept of a layer that is complete; all of it if it has no more than that."""
        rows = self.rows(layer.index)
        if rows >= layer.keys.shape[2]:
            return Selection(all_rows(layer.keys))
        return Selection(self.selector.select(layer, rows, self.request.scoring))

    def shrink(self) -> Iterable[tuple[int, torch.Tensor]]:
        """Finished layers that keep less from now on: index, and (B, Hkv, k) of their kept rows.

        Called when a layer's rows are chosen, before they are copied.
        """
        return ()


def all_rows(keys: torch.Tensor) -> torch.Tensor:
    """The positions of every row of (B, Hkv, S, D): (B, Hkv, S), int64."""
    return torch.arange(keys.shape[2], device=keys.device).repeat(*keys.shape[:2], 1)
