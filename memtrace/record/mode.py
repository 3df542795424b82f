"""What our dispatch modes have in common: one for a thread, out of the way of torch.compile."""

from typing import Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode


class Mode(TorchDispatchMode):
    """A dispatch mode of ours; it belongs to the thread that enters it."""

    supports_higher_order_operators = True
    _inference = False

    def __enter__(self) -> Self:
        self._inference = torch.is_inference_mode_enabled()
        return super().__enter__()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that True puts around each call costs more than our own work

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def leave(self) -> bool:
        """Take the mode from this thread; False where it is gone, under another one, or not now.

        At its end ``torch.inference_mode()`` puts the dispatch keys of its beginning back. Had the
        last mode gone meanwhile, PyTorch would look for one at the next operator and fail.
        """
        within = torch.is_inference_mode_enabled() and not self._inference
        if within or _get_current_dispatch_mode() is not self:
            return False
        self.__exit__(None, None, None)
        return True
