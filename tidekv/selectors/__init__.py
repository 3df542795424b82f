"""Selectors: which rows of a finished layer are kept. Adding one is one file and one line here."""

from collections.abc import Mapping

from tidekv.errors import check_choice, check_made
from tidekv.selectors.adakv import AdaKV
from tidekv.selectors.base import Choice, LayerEnd, Request, Selection, Selector
from tidekv.selectors.cake import CAKE
from tidekv.selectors.chunkkv import ChunkKV
from tidekv.selectors.h2o import H2O
from tidekv.selectors.keydiff import KeyDiff
from tidekv.selectors.knorm import Knorm
from tidekv.selectors.kvpress import KvPress
from tidekv.selectors.pyramidkv import PyramidKV
from tidekv.selectors.random import Random
from tidekv.selectors.recent import Recent
from tidekv.selectors.snapkv import SnapKV
from tidekv.selectors.streamingllm import StreamingLLM
from tidekv.selectors.tova import TOVA

#: By name, those that can be made with their defaults; :class:`KvPress` needs a press.
SELECTORS: Mapping[str, type[Selector]] = {
    "snapkv": SnapKV,
    "pyramidkv": PyramidKV,
    "adakv": AdaKV,
    "chunkkv": ChunkKV,
    "cake": CAKE,
    "keydiff": KeyDiff,
    "h2o": H2O,
    "tova": TOVA,
    "streamingllm": StreamingLLM,
    "knorm": Knorm,
    "recent": Recent,
    "random": Random,
}

__all__ = [
    "CAKE",
    "H2O",
    "SELECTORS",
    "TOVA",
    "AdaKV",
    "Choice",
    "ChunkKV",
    "KeyDiff",
    "Knorm",
    "KvPress",
    "LayerEnd",
    "PyramidKV",
    "Random",
    "Recent",
    "Request",
    "Selection",
    "Selector",
    "SnapKV",
    "StreamingLLM",
    "make",
]


def make(selector: str | Selector | None) -> Selector | None:
    """A name stands for the selector with its defaults.

    Raises:
        InfeasibleError: no selector has this name, or it is none.
    """
    if isinstance(selector, str):
        check_choice("selector", selector, SELECTORS)
        selector = SELECTORS[selector]()
    if selector is not None:
        check_made("selector", selector, Selector)
    return selector
