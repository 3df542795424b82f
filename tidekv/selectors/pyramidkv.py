"""PyramidKV (Cai et al. 2024, arXiv 2406.02069): SnapKV with fewer rows in higher layers."""

from dataclasses import dataclass

from tidekv.budgets import pyramid
from tidekv.errors import InfeasibleError
from tidekv.selectors.base import Choice, Request
from tidekv.selectors.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """Keep what the last queries attend to, fewer rows the higher the layer.

    Rows beside the mandatory ones fall linearly over the layers, from 2 - 1/``beta`` of their mean
    in the first to 1/``beta`` of it in the last. The window counts as part of the budget. Where
    the first layer would get more rows than there are, the slope is as steep as fits.

    The authors' code (Zefan-Cai/KVCache-Factory) takes whole steps per layer, which gives the
    model up to 5 % more rows than the budget, and equal budgets to prompts shorter than twice the
    budget; here the sum over the layers is the budget exactly, whatever the prompt. ``beta`` is
    theirs; the parameters of the scores are SnapKV's (the authors' class has a window of 64 and
    average pooling over 5; their LongBench runs 8, and max pooling over 7).

    Attributes:
        beta: mean rows per rows of the last layer, those beside the mandatory ones.
    """

    beta: float = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta >= 1:
            raise InfeasibleError(f"PyramidKV needs beta ≥ 1, not {self.beta}.")

    def begin(self, request: Request) -> Choice:
        """See :meth:`tidekv.selectors.base.Selector.begin`."""
        return _PyramidChoice(self, request)


class _PyramidChoice(Choice):
    def __init__(self, selector: PyramidKV, request: Request) -> None:
        super().__init__(selector, request)
        free = pyramid(
            request.layers,
            mean=request.rows - selector.mandatory,
            most=request.prompt_tokens - selector.mandatory,
            beta=selector.beta,
        )
        self._rows = [selector.mandatory + rows for rows in free]

    def rows(self, index: int) -> int:
        return self._rows[index]
