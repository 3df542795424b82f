"""Any press of NVIDIA's kvpress as a selector."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tidekv.errors import InfeasibleError
from tidekv.selectors.base import Choice, LayerEnd, Request, Selector

#: Presses of kvpress that read the attention inputs of every row, by the names of their classes.
READ_EVERY_INPUT = frozenset(
    (
        "BlockPress",
        "CapPress",
        "ChunkPress",
        "CompactorPress",
        "ExpectedAttentionPress",
        "LeverageScorePress",
        "NonCausalAttnPress",
    )
)


@dataclass(frozen=True)
class KvPress(Selector):
    """Keep the rows that a press of kvpress keeps.

    For presses that choose rows of one layer, the same number for each head, by its keys and values
    and the inputs of its attention; docs/tidekv.md lists which do. Not for those that need
    attention matrices or another forward, or that mask rows instead of dropping them.

    The press is given the compression ratio that stands for the budget; one that rounds (ChunkKV)
    or spreads it over layers (PyramidKV) keeps another number of rows. Its memory is its own:
    presses score densely. Of its keys nothing is taken, so rotations that it changes don't count.

    Attributes:
        press: an object with kvpress's ``compress`` and ``compression_ratio``; it is copied.
        every_input: whether it reads what attention was given for every row, (B, S, d) more while a
            layer runs, and not for the last rows only; true anyway of those in
            :data:`READ_EVERY_INPUT`.
        input_rows: one more than the longest window in it, which is what SnapKV's press asks for.
    """

    press: Any
    every_input: bool = False
    input_rows: int = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        with _told(self.press):  # the ratio of some is known after a forward only
            takes = all(hasattr(self.press, name) for name in ("compress", "compression_ratio"))
        if not takes:
            raise InfeasibleError(
                "KvPress takes a press that has a compression_ratio, such as "
                f"kvpress.SnapKVPress(), not {self.press!r}."
            )
        object.__setattr__(self, "press", copy.deepcopy(self.press))
        nested = list(_nested(self.press))
        known = any(base.__name__ in READ_EVERY_INPUT for one in nested for base in type(one).mro())
        object.__setattr__(self, "every_input", self.every_input or known)
        windows = [getattr(one, "window_size", None) or 0 for one in nested]
        object.__setattr__(self, "input_rows", 1 + max(windows))

    def check(self, request: Request) -> None:
        """See :meth:`tidekv.selectors.base.Selector.check`."""
        super().check(request)
        if self.input_rows > request.prompt_tokens:
            raise InfeasibleError(
                f"{type(self.press).__name__} reads {self.input_rows} rows, more than the prompt "
                f"of {request.prompt_tokens} tokens has; use a smaller window_size, or "
                "selector=None."
            )

    def begin(self, request: Request) -> Choice:
        """See :meth:`tidekv.selectors.base.Selector.begin`; some presses remember things."""
        return Choice(KvPress(self.press, self.every_input), request)

    def select(self, layer: LayerEnd, rows: int, scoring: str) -> torch.Tensor:
        """What the press keeps of the layer, in ascending order: (B, Hkv, about ``rows``).

        Raises:
            InfeasibleError: it needs what it isn't given, or doesn't choose rows, but masks or
            changes them.
        """
        with _told(self.press), _rotating(layer), _Gathering(layer.values) as gathering:
            # Half a row more than the budget: presses round down, and floats fall on either side.
            self.press.compression_ratio = 1 - (rows + 0.5) / layer.keys.shape[2]
            _, kept = self.press.compress(
                layer.attention,
                layer.inputs,
                layer.keys,
                layer.values,
                None,
                {"position_embeddings": layer.rope},
            )
        if gathering.index is None or kept is not gathering.result:
            raise InfeasibleError(
                f"{type(self.press).__name__} doesn't keep rows as they are; use a press that "
                "chooses the same number of rows for each head."
            )
        return gathering.index[..., 0].sort(dim=-1).values


@contextmanager
def _rotating(layer: LayerEnd) -> Iterator[None]:
    """Have the model's rotary embedding on the attention module, where kvpress looks for it."""
    if layer.rotary is None or hasattr(layer.attention, "rotary_emb"):
        yield
        return
    # Past nn.Module's own way, which would make it a part of the module.
    object.__setattr__(layer.attention, "rotary_emb", layer.rotary)
    try:
        yield
    finally:
        object.__delattr__(layer.attention, "rotary_emb")


@contextmanager
def _told(press: Any) -> Iterator[None]:
    """Say of a press that fails what it isn't given.

    Raises:
        InfeasibleError: it failed, for another reason than memory.
    """
    try:
        yield
    except (AssertionError, AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise InfeasibleError(
            f"{type(press).__name__} can't choose rows by keys, values and the last inputs of one "
            f"layer ({type(error).__name__}: {error}); use another press."
        ) from error


class _Gathering(TorchFunctionMode):
    """Watches which rows are gathered from ``values``; presses return the rows, not the indices."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self._values = values
        self.index: torch.Tensor | None = None
        self.result: torch.Tensor | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.gather and args[0] is self._values:
            self.index, self.result = args[2], result
        return result


def _nested(press: Any) -> Iterable[Any]:
    """A press and those that it wraps."""
    while press is not None:
        yield press
        press = getattr(press, "press", None)
