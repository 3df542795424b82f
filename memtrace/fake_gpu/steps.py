"""What the models of :mod:`~memtrace.fake_gpu.scratch` are written in."""

from collections import Counter
from typing import NamedTuple

import torch

#: A step of a :class:`Scratch`.
GIVE_BACK = None


class Scratch(NamedTuple):
    """What the kernel of one call takes.

    Attributes:
        steps: what it allocates, in order: i ≥ 0 the tensor that it returns at place i, -n scratch
            of n bytes, :data:`GIVE_BACK` the latest scratch goes; what is left of that goes at the
            end. None: what it returns and nothing else.
        product: whether it is a matrix product, which has a workspace of cuBLAS.
    """

    steps: tuple[int | None, ...] | None = None
    product: bool = False


#: Nothing but what it returns.
NOTHING = Scratch()

HALVES = (torch.float16, torch.bfloat16)

#: The operators that were met whose scratch memory isn't known.
met: Counter[str] = Counter()
