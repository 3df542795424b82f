"""Matrix products by a layer's weights, answered in one step.

``linear`` is a program of five operators that ends in one product and views of it; a model calls it
more than anything else. Where none but the fake GPU would see the parts, the whole is answered with
what they make: the product's result, and cuBLAS's workspace.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from memtrace.fake_gpu import outcomes, tensors

_plain = F.linear
_modes = torch._C._len_torch_dispatch_stack
_function_mode_active = torch._C._is_torch_function_mode_enabled


def install() -> None:
    """Have PyTorch ask here. Only where values aren't followed, which would be seen above."""
    F.linear = linear
    torch._C._nn.linear = linear


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As :func:`torch.nn.functional.linear`."""
    kind = type(weight)
    if (
        bias is not None
        or type(input) is not Tensor
        or not (kind is Parameter or kind is Tensor)
        or not input.is_cuda
        or not weight.is_cuda
        or _modes() != 1
        or _function_mode_active()
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled("cuda")
        or not input.is_contiguous()
        or not weight.is_contiguous()
    ):
        return _plain(input, weight, bias)
    (*rows, size), dtype = input.shape, input.dtype
    count = input.numel() * weight.shape[0] // size if size else 0
    if not rows or weight.shape[1:] != (size,) or weight.dtype != dtype or not count:
        return _plain(input, weight, bias)
    shape = (*rows, weight.shape[0])
    made = tensors.new(shape, _contiguous(shape), dtype, count * input.itemsize, input.device)
    outcomes.memory().workspace(input.device)
    return made


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[Any] = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, size * strides[0])
    return tuple(strides)
