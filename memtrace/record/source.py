"""What the attribution rules ask of whatever sees the allocations."""

from typing import Protocol

from torch import Tensor


class Source(Protocol):
    """Books tensors under components.

    A source may learn of a block later than the rules do. So it answers no questions: what a rule
    would ask first is a condition that it hands over.
    """

    def retag(self, tensor: Tensor, component: str, *, only: tuple[str, ...] | None = None) -> None:
        """The storage of ``tensor`` belongs to ``component``; one that wasn't booked is adopted.

        Args:
            tensor: any tensor; of a wrapper, what it wraps.
            component: where its bytes belong from now on.
            only: components, with or without detail, from which a booked storage may be taken;
                "Act" stands for "Act/detail" too. None: from any.
        """

    def adopt(self, tensor: Tensor, component: str) -> None:
        """The storage of ``tensor`` belongs to ``component`` if it isn't booked; else nothing."""
