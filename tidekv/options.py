"""Parameters of schedules, selectors and caches by name, and values for them from text."""

import inspect
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from tidekv.errors import InfeasibleError

_TRUTH = {"true": True, "false": False}


def parameters(made: type) -> Mapping[str, inspect.Parameter]:
    """What a class can be made with, by name; each has a type and a default."""
    return dict(inspect.signature(made, eval_str=True).parameters)


def defaults(made: type) -> dict[str, Any]:
    """The value of each parameter where none is given."""
    return {name: one.default for name, one in parameters(made).items()}


def chosen(method: Any) -> dict[str, Any]:
    """The parameters of a schedule or selector, as they are."""
    return {name: getattr(method, name) for name in parameters(type(method))}


def check(method: Any) -> None:
    """
    Raises:
        InfeasibleError: a parameter of a schedule, selector or cache's layer is to be a number or a
            truth value and isn't.
    """
    for name, one in parameters(type(method)).items():
        kinds = get_args(one.annotation) or (one.annotation,)
        if all(kind in _PLAIN for kind in kinds) and not any(
            _is(getattr(method, name), kind) for kind in kinds
        ):
            raise InfeasibleError(
                f"The parameter {name} of {type(method).__name__} is "
                f"{' or '.join(_choices(one.annotation))}, not {getattr(method, name)!r}."
            )


_PLAIN: Mapping[Any, type] = {bool: bool, int: Integral, float: Real, NoneType: NoneType}


def _is(value: Any, kind: Any) -> bool:
    """Whether a value is of a plain type; True is no number here."""
    return isinstance(value, _PLAIN[kind]) and isinstance(value, bool) <= (kind is bool)


def parse(what: str, made: type, pairs: Sequence[str]) -> dict[str, Any]:
    """Values for parameters of ``made``, each of the type that the parameter has.

    Args:
        what: is made, for messages, such as "selector snapkv".
        pairs: ``NAME=VALUE`` each.

    Raises:
        InfeasibleError: no such parameter, or no such value.
    """
    known = parameters(made)
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise InfeasibleError(f"An option of the {what} is NAME=VALUE, not {pair!r}.")
        if name not in known:
            has = f"use one of {', '.join(known)}" if known else "it has none; drop it"
            raise InfeasibleError(f"The {what} has no parameter {name!r}; {has}.")
        if name in values:
            raise InfeasibleError(f"The parameter {name} of the {what} is given twice; drop one.")
        values[name] = _value(what, name, text, known[name].annotation)
    return values


def _value(what: str, name: str, text: str, kind: Any) -> Any:
    choices = _choices(kind)
    for read in choices.values():
        try:
            return read(text)
        except (KeyError, ValueError):
            continue
    raise InfeasibleError(
        f"The parameter {name} of the {what} is {' or '.join(choices)}, not {text!r}."
    )


def _choices(kind: Any) -> Mapping[str, Any]:
    """What a value of a type can be, in words, and what reads each from text."""
    if get_origin(kind) in (Union, UnionType):
        # None first: every text is a string.
        parts = sorted(get_args(kind), key=lambda part: part is not NoneType)
        return {words: read for part in parts for words, read in _choices(part).items()}
    if get_origin(kind) is Literal:
        return {word: {word: word}.__getitem__ for word in get_args(kind)}
    simple: dict[Any, Mapping[str, Any]] = {
        NoneType: {"none": {"none": None, "None": None}.__getitem__},
        bool: {"true or false": lambda text: _TRUTH[text.lower()]},
        int: {"a whole number": int},
        float: {"a number": float},
        str: {"a text": str},
    }
    return simple[kind]
