"""Selectors: which rows of a finished layer are kept. Adding one is one file and one line here."""

from collections.abc import Mapping

from tidekv.errors import check_choice
from tidekv.selectors.base import LayerEnd, Selector
from tidekv.selectors.snapkv import SnapKV

SELECTORS: Mapping[str, type[Selector]] = {
    "snapkv": SnapKV,
}

__all__ = ["SELECTORS", "LayerEnd", "Selector", "SnapKV", "make"]


def make(selector: str | Selector | None) -> Selector | None:
    """A name stands for the selector with its defaults.

    Raises:
        InfeasibleError: no selector has this name.
    """
    if not isinstance(selector, str):
        return selector
    check_choice("selector", selector, SELECTORS)
    return SELECTORS[selector]()
