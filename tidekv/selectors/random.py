"""Random rows: the control that every method has to beat."""

from dataclasses import dataclass

import torch

from tidekv.errors import InfeasibleError
from tidekv.scoring import keep_best
from tidekv.selectors.base import Choice, LayerEnd, Request, Selection, Selector, all_rows


@dataclass(frozen=True)
class Random(Selector):
    """Keep random rows, the same for a seed whatever the device: a control.

    Attributes:
        seed: of the draws; each layer has a generator of its own. 0 to 2³² - 1.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.seed < 2**32:
            raise InfeasibleError(f"Random needs a seed in 0..2³²-1, not {self.seed}.")

    def begin(self, request: Request) -> Choice:
        """See :meth:`tidekv.selectors.base.Selector.begin`."""
        return _RandomChoice(self, request)

    def select(self, layer: LayerEnd, rows: int, scoring: str) -> torch.Tensor:
        """See :meth:`tidekv.selectors.base.Selector.select`; the layer's first draw."""
        return draw(self.generator(layer.index), layer.keys, rows)

    def generator(self, index: int) -> torch.Generator:
        """That of a layer, before its first draw."""
        # Of a seed the generator takes 32 bits; layers lie far apart in them (golden ratio).
        return torch.Generator().manual_seed((self.seed + 0x9E3779B1 * index) % 2**32)


class _RandomChoice(Choice):
    """Goes on drawing where a layer is cut more than once; the same draw would favour places."""

    selector: Random

    def __init__(self, selector: Random, request: Request) -> None:
        super().__init__(selector, request)
        self._generators = [selector.generator(index) for index in range(request.layers)]

    def select(self, layer: LayerEnd) -> Selection:
        rows = self.rows(layer.index)
        if rows >= layer.keys.shape[2]:
            return Selection(all_rows(layer.keys))
        return Selection(draw(self._generators[layer.index], layer.keys, rows))


def draw(generator: torch.Generator, keys: torch.Tensor, rows: int) -> torch.Tensor:
    """Positions in (B, Hkv, S, D) keys: (B, Hkv, rows), drawn on the CPU."""
    length = keys.shape[2]
    scores = torch.rand(*keys.shape[:2], length, generator=generator)
    return keep_best(scores, rows=rows, length=length).to(keys.device)
