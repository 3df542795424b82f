"""CAKE (Qin et al. 2025, arXiv 2503.12491): layers share one budget and shrink as others end."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from tidekv.budgets import proportional
from tidekv.errors import InfeasibleError
from tidekv.scoring import Attention, Rule, keep_best, key_scores
from tidekv.selectors.base import Choice, LayerEnd, Request, Selection, Selector


@dataclass(frozen=True)
class CAKE(Selector):
    """Keep what the last queries attend to steadily, more of it in layers that need more.

    With A the weights that the last ``window`` queries give the keys before them:

        preference of a layer   P = H^(1/tau1) · V^(1/tau2),
                                H = -Σ A·log A,   V = Σ Var_q A   (sums over all there is)
        score of a key          mean_q A + gamma · Var_q A, average pooled, mean over the group

    Layers that have ended share the model's budget in proportion to P; as more of them end each
    keeps less, so the first holds all of the budget at first. The window is always kept and counts
    as part of the budget.

    ``gamma=200``, the kernel and the variance (of W - 1 degrees of freedom) are those of the
    authors' code (antgroup/cakekv), which sets ``tau1`` and ``tau2`` by model and budget, e.g. 1.6
    and 0.4 for Llama 3.1 8B with 1,024 rows. It gives what a layer can't use, being no longer than
    the prompt, to the others in equal parts; here they share it in proportion too, which is what
    keeps a layer from growing again. The prompts of a batch have one budget, by their common P.

    Attributes:
        window: rows of the observation window, 2 at least.
        gamma: weight of the variance in a key's score.
        tau1: temperature of the entropy.
        tau2: temperature of the variance.
        kernel_size: width of the average pooling over neighbouring keys; odd.
        aggregate: of scores, over the query heads of a KV head.
        aggregate_first: aggregate before pooling, not after it; the same for the mean.
        block_size: keys that blockwise scoring reads at a time.
    """

    window: int = 32
    gamma: float = 200.0
    tau1: float = 1.0
    tau2: float = 1.0
    kernel_size: int = 5
    aggregate: Literal["mean", "max"] = "mean"
    aggregate_first: bool = True
    block_size: int = 2048

    across_layers = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 2 or self.block_size < 1:
            raise InfeasibleError(
                "CAKE needs window ≥ 2 (it has a variance) and block_size ≥ 1, not "
                f"window={self.window}, block_size={self.block_size}."
            )
        if not (self.gamma >= 0 and self.tau1 > 0 and self.tau2 > 0):
            raise InfeasibleError(
                "CAKE needs gamma ≥ 0, tau1 > 0 and tau2 > 0, not "
                f"gamma={self.gamma}, tau1={self.tau1}, tau2={self.tau2}."
            )
        self._rule()  # checks its part

    @property
    def mandatory(self) -> int:
        """The window."""
        return self.window

    def begin(self, request: Request) -> Choice:
        """See :meth:`tidekv.selectors.base.Selector.begin`."""
        return _CakeChoice(self, request)

    def select(self, layer: LayerEnd, rows: int, scoring: str) -> torch.Tensor:
        """See :meth:`tidekv.selectors.base.Selector.select`."""
        scores, _ = self.measure(layer, scoring)
        return keep_best(scores, rows=rows, length=layer.keys.shape[2])

    def measure(self, layer: LayerEnd, scoring: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of the rows before the window, (B, Hkv, S-W), and the layer's preference, ()."""
        # fp64, so that the order of the sums doesn't decide about a row.
        entropy = torch.zeros((), dtype=torch.float64, device=layer.keys.device)
        variance = torch.zeros_like(entropy)

        def indicator(weights: torch.Tensor) -> torch.Tensor:
            shifts, means = weights.var(3), weights.mean(3)
            variance.add_(shifts.sum(dtype=torch.float64))
            # In place, the weights being of no further use; of each key first, which stays in one
            # block whatever those are, since fp64 means a copy.
            torch.special.entr(weights, out=weights)
            entropy.add_(weights.sum(3).sum(dtype=torch.float64))
            return means.add_(shifts, alpha=self.gamma)

        scores = key_scores(
            Attention(layer.queries, layer.keys, layer.scaling, layer.softcap),
            self._rule(),
            scoring=scoring,
            block_size=self.block_size,
            reduce=indicator,
        )
        return scores, entropy ** (1 / self.tau1) * variance ** (1 / self.tau2)

    def _rule(self) -> Rule:
        return Rule(self.aggregate, "avg", self.kernel_size, self.aggregate_first)


class _CakeChoice(Choice):
    """Remembers the preferences of the layers that ended, and the scores of their kept rows."""

    selector: CAKE

    def __init__(self, selector: CAKE, request: Request) -> None:
        super().__init__(selector, request)
        self._preferences: dict[int, float] = {}
        self._scores: dict[int, torch.Tensor] = {}  # (B, Hkv, rows kept before the window)
        self._budgets: dict[int, int] = {}  # those rows

    def select(self, layer: LayerEnd) -> Selection:
        scores, preference = self.selector.measure(layer, self.request.scoring)
        self._preferences[layer.index] = float(preference)
        self._budgets = self._shared()
        window = self.selector.window
        budget = min(self._budgets[layer.index], scores.shape[2])
        kept = keep_best(scores, rows=budget + window, length=layer.keys.shape[2])
        self._scores[layer.index] = scores.gather(-1, kept[..., :budget])
        return Selection(kept)

    def shrink(self) -> Iterable[tuple[int, torch.Tensor]]:
        for index, scores in self._scores.items():
            held, budget = scores.shape[2], self._budgets[index]
            if budget < held:
                window = self.selector.window
                kept = keep_best(scores, rows=budget + window, length=held + window)
                self._scores[index] = scores.gather(-1, kept[..., :budget])
                yield index, kept

    def _shared(self) -> dict[int, int]:
        """Rows before the window of each layer that has ended."""
        request, window = self.request, self.selector.window
        most = request.prompt_tokens - window
        total = request.layers * (request.rows - window)
        ended = list(self._preferences)
        weights = list(self._preferences.values())
        return dict(
            zip(ended, proportional(weights, min(total, len(ended) * most), most), strict=True)
        )
