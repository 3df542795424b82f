"""What an operator means for known values, from its schema and a few names.

Unlisted operators follow their schema: what they return can be computed once everything they take
is known, and what they write to is overwritten. Operators outside ``aten`` may do anything to a
host tensor, so their results count as unknown.
"""

from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any

import torch
from torch import Tensor


class Kind(IntEnum):
    """How the mode treats an operator."""

    PASS = auto()  # no values change hands: views, metadata, contents that stay undefined
    PURE = auto()  # returns something new
    WRITE = auto()  # overwrites some of its arguments
    FILL = auto()  # returns a new tensor, one value throughout, whatever it takes
    CAST = auto()  # a copy, to the host perhaps
    COPY = auto()  # copies into an argument, on the host perhaps
    READ = auto()  # returns a number to the host
    SHAPE = auto()  # the size of what it returns depends on values
    INDEX = auto()  # the same, of boolean indices only
    CHOICE = auto()  # picks places by their scores
    COMPOSITE = auto()  # a program of other operators
    OPAQUE = auto()  # no ordinary operator


@dataclass(frozen=True, slots=True)
class Rule:
    """An operator's treatment.

    Attributes:
        name: without namespace and overload.
        computable: a host tensor gives the same values, and soon: no random numbers, nothing of
            a user's, none of a model's own work.
        has_device: takes a ``device``, which a copy on the host must not inherit.
        writes: position and name of the arguments written to, and whether they are also read.
        in_place: writes to its first argument alone, and reads it too.
        harmless: of a composite: reads no values, whatever it takes.
        operator: keeps the identity valid that the rule is found by.
    """

    kind: Kind
    name: str
    operator: Any
    computable: bool = False
    has_device: bool = False
    writes: tuple[tuple[int, str, bool], ...] = ()
    in_place: bool = False
    harmless: bool = False


_PASS = {
    "record_stream",
    "_assert_async",
    "set_",
    "empty",
    "empty_like",
    "empty_strided",
    "empty_permuted",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "resize_as_",
}
_FILL = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
_OVERWRITE = {"copy_", "fill_", "zero_"}  # whatever was there before
_INDEX = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
_CHOICE = {("argmax", ""), ("max", "dim"), ("topk", ""), ("sort", ""), ("sort", "stable")} | {
    ("multinomial", ""),
    ("gather", ""),
}

#: The model's work: matrix products, and the angles of rotary positions. Nothing that decides
#: anything comes of it alone, and to compute it would cost more than all the rest.
_NOT_COMPUTED = {
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "addbmm",
    "_addmm_activation",
    "convolution",
    "cos",
    "sin",
}

#: Composite operators on the path of every forward. They only compute, so that one with an unknown
#: argument needn't be taken apart, which costs some microseconds.
_HARMLESS = {
    "chunk",
    "contiguous",
    "conv1d",
    "dropout",
    "einsum",
    "expand_as",
    "feature_dropout",
    "flatten",
    "layer_norm",
    "linear",
    "log_softmax",
    "matmul",
    "movedim",
    "narrow",
    "numpy_T",
    "pad",
    "reshape",
    "rms_norm",
    "scaled_dot_product_attention",
    "softmax",
    "split",
    "square",
    "swapaxes",
    "tile",
    "to.dtype",
    "unflatten",
    "view_as",
}

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def rule_of(operator: Any) -> Rule:
    """How to treat an operator that was never seen before."""
    if not isinstance(operator, torch._ops.OpOverload):
        return Rule(Kind.OPAQUE, str(operator), operator)
    schema = operator._schema
    namespace, _, name = schema.name.partition("::")
    tags = operator.tags
    arguments = schema.arguments
    if name in _PASS or torch.Tag.inplace_view in tags:
        return Rule(Kind.PASS, name, operator)
    if is_composite(operator):
        has_device = any(argument.name == "device" for argument in arguments)
        harmless = name in _HARMLESS or f"{name}.{schema.overload_name}" in _HARMLESS
        return Rule(Kind.COMPOSITE, name, operator, has_device=has_device, harmless=harmless)
    writes = tuple(
        (place, argument.name, not argument.is_out and name not in _OVERWRITE)
        for place, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    if not writes and all(value.alias_info is not None for value in schema.returns):
        return Rule(Kind.PASS, name, operator)
    return Rule(
        _kind(name, schema.overload_name, bool(writes), tags),
        name,
        operator,
        computable=namespace in ("aten", "prims")
        and torch.Tag.nondeterministic_seeded not in tags
        and name not in _NOT_COMPUTED,
        has_device=any(argument.name == "device" for argument in arguments),
        writes=writes,
        in_place=len(writes) == 1 and writes[0][0] == 0 and writes[0][2] and name not in _INDEX,
    )


def _kind(name: str, overload: str, writes: bool, tags: list[torch.Tag]) -> Kind:
    if name in _INDEX:
        return Kind.INDEX
    if name == "copy_":
        return Kind.COPY
    if writes:
        return Kind.WRITE
    if name == "_to_copy":
        return Kind.CAST
    if name in _FILL:
        return Kind.FILL
    if (name, overload) in _CHOICE:
        return Kind.CHOICE
    if torch.Tag.data_dependent_output in tags:
        return Kind.READ
    if torch.Tag.dynamic_output_shape in tags or name.startswith("_to_sparse"):
        return Kind.SHAPE
    return Kind.PURE


def is_composite(operator: Any) -> bool:
    """Whether an operator is a program of others on every device."""
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), _COMPOSITE))
    except RuntimeError:  # a prim:: operator, unknown to the dispatcher
        return False


def written(rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call overwrites."""
    found: list[Tensor] = []
    for place, name, _ in rule.writes:
        value = args[place] if place < len(args) else kwargs.get(name)
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, Tensor))
    return found
