"""Ada-KV (Feng et al. 2024, arXiv 2407.11550): SnapKV with a budget of its own for each head."""

from dataclasses import dataclass

import torch

from tidekv.errors import InfeasibleError
from tidekv.scoring import best, best_of_each
from tidekv.selectors.base import Choice, LayerEnd, Request, Selection, all_rows
from tidekv.selectors.snapkv import SnapKV


@dataclass(frozen=True)
class AdaKV(SnapKV):
    """Keep what the last queries attend to, more rows in heads whose attention is spread wide.

    The best rows of all KV heads of a layer compete for the layer's Hkv·K; a head's budget is the
    number of its rows among the winners, mixed with an equal share:

        K_h = (1 - safeguard) · winners_h + safeguard · K

    K and winners are those beside the mandatory rows, which every head keeps. Fractions are
    rounded so that a layer's sum is exact for each prompt (the authors' code rounds each head, so
    that a layer may lose some rows).

    The scores are SnapKV's, mean or maximum of a group before pooling, as in the authors' code.
    There ``safeguard`` (``floor_alpha``) is 0.2 in the runs of the paper and 0.5 in the README's
    example. Equal scores in two heads are won by the lower head.
    ``select``, which has no head budgets, is SnapKV's.

    Attributes:
        safeguard: the share of the budget that is spread evenly.
    """

    safeguard: float = 0.2

    head_budgets = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.safeguard <= 1:
            raise InfeasibleError(f"AdaKV needs a safeguard in 0..1, not {self.safeguard}.")

    def begin(self, request: Request) -> Choice:
        """See :meth:`tidekv.selectors.base.Selector.begin`."""
        return _AdaChoice(self, request)

    def spread(self, layer: LayerEnd, rows: int, scoring: str) -> Selection:
        """``rows`` per KV head on average, spread over the heads of each prompt."""
        scores = self.scores(layer, scoring)
        batch, heads = scores.shape[:2]
        length, free = layer.keys.shape[2], rows - self.mandatory
        scores[..., : self.sinks] = float("-inf")  # they are kept anyway
        budgets = self._budgets(scores, free)
        top = best_of_each(scores, budgets, total=heads * free)
        head = torch.arange(heads, device=top.device).view(-1, 1)
        always = torch.arange(self.mandatory, device=top.device)
        always = always + (length - self.mandatory) * (always >= self.sinks)
        always = (head * length + always).flatten().expand(batch, -1)
        # Positions with their heads as one number, so that one sort orders both.
        kept = torch.cat((top + (length - scores.shape[2]) * (top // scores.shape[2]), always), -1)
        return Selection(
            kept.sort(dim=-1).values.flatten() % length,
            budgets + self.mandatory,
            least=int(self.safeguard * free) + self.mandatory,
        )

    def _budgets(self, scores: torch.Tensor, free: int) -> torch.Tensor:
        """Rows of each head beside the mandatory ones: (B, Hkv), int64, Hkv·``free`` per prompt.

        Args:
            scores: (B, Hkv, n), contiguous.
        """
        batch, heads, candidates = scores.shape
        winners = best(scores.flatten(1), first=0, count=heads * free) // candidates
        number = torch.zeros(batch, heads, dtype=torch.int64, device=scores.device)
        number.scatter_add_(1, winners, torch.ones_like(winners))
        exact = number.double() * (1 - self.safeguard) + self.safeguard * free
        budgets = exact.floor()
        # The rows that rounding down lost go to the largest remainders, lower heads first.
        rank = (exact - budgets).argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        lost = heads * free - budgets.sum(-1, keepdim=True)
        return (budgets + (rank < lost)).to(torch.int64)


class _AdaChoice(Choice):
    selector: AdaKV

    def select(self, layer: LayerEnd) -> Selection:
        rows = self.rows(layer.index)
        batch, heads, present = layer.keys.shape[:3]
        if rows >= present:
            counts = torch.full((batch, heads), present, device=layer.keys.device)
            return Selection(all_rows(layer.keys).flatten(), counts, least=present)
        return self.selector.spread(layer, rows, self.request.scoring)
