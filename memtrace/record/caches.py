"""Attribution of key/value caches: ``KV_res/full``, and ``KV_res/compact`` where quantized.

A cache is what transformers calls one, or whatever else a model is handed or returns under the
names of :data:`_NAMES`: a tuple of tensors, or an object of the user's own class.

=========================  ====================================================================
what                       wrong when
=========================  ====================================================================
methods that store         one has another name than those of :data:`_METHODS`: then its bytes
                           are workspace until the model returns
attributes of a layer      a layer keeps workspace in an attribute
``_quantized…`` attribute  a class of the user's own keeps its codes under another name
``_quantize()``            is workspace (Temp) only in transformers' own classes
tuples that are returned   they are workspace while the model runs; so they stay where another
                           module calls the model
=========================  ====================================================================
"""

import weakref
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor

from memtrace.components import TENSOR_COMPONENTS
from memtrace.record.rule import Function, Rule, Wrapping

#: What models call a cache, among their arguments and on what they return.
_NAMES = ("cache", "past_key_values", "past_key_value", "cache_params")

#: Methods of a cache that put other storages into it.
_METHODS = (
    "update",
    "update_conv_state",
    "update_recurrent_state",
    "update_ssm_state",
    "update_indexer",
    "early_initialization",
    "prefetch",
    "offload",
    "reorder_cache",
    "crop",
    "batch_repeat_interleave",
    "batch_select_indices",
)

_FULL, _COMPACT = "KV_res/full", "KV_res/compact"

#: From where a cache takes what it stores: not from KV that somebody else called compact.
_NOT_RESIDENT = tuple(name for name in TENSOR_COMPONENTS if name != "KV_res")
_TAKEN_FROM = {_FULL: _NOT_RESIDENT, _COMPACT: (*_NOT_RESIDENT, _FULL)}


_CONTAINERS = (tuple, list, dict)


class Caches:
    """The rules of caches."""

    def __init__(self, wrapping: Wrapping) -> None:
        self._wrapping = wrapping
        self._booked: weakref.WeakSet[Any] = weakref.WeakSet()  # layers of caches
        self._rule = Rule(_FULL, ("module", "cache"))
        #: Whether a class has methods that are followed.
        self._classes: dict[type, bool] = {}

    def follow_library(self, module: ModuleType) -> None:
        """Follow every cache class of ``transformers.cache_utils``."""
        quantize = self._wrapping.in_rule(Rule("Temp", ("module", "quantize")))
        for owner in list(vars(module).values()):
            if isinstance(owner, type) and owner.__module__ == module.__name__:
                if issubclass(owner, module.Cache):
                    self._follow(owner)
                elif "_quantize" in vars(owner):
                    self._wrapping.wrap(owner, "_quantize", quantize)

    def handed(self, arguments: dict[str, Any]) -> None:
        """Follow the cache that a model is called with, if its class isn't known yet."""
        for name in _NAMES:
            cache = arguments.get(name)
            if cache is not None and type(cache) not in self._classes:
                self._follow(type(cache))

    def returned(self, out: dict[str, Any]) -> None:
        """Book the cache among what a model returned, where no method of its own did."""
        for name in _NAMES:
            cache = out.get(name)
            if isinstance(cache, (tuple, list, dict)):
                self._book(cache, _FULL)
            elif cache is not None and not self._classes.get(type(cache)):
                self._follow(type(cache))
                self._stored(cache)

    def _follow(self, cache: type) -> None:
        for owner in reversed(cache.__mro__):
            if owner not in self._classes and owner.__module__ != "builtins":
                self._classes[owner] = any(map(self._classes.get, owner.__mro__))
                for name in _METHODS:
                    if isinstance(vars(owner).get(name), FunctionType):
                        self._wrapping.wrap(owner, name, self._storing)
                        self._classes[owner] = True
        self._classes.setdefault(cache, False)

    def _storing(self, plain: Function) -> Function:
        return self._wrapping.in_rule(self._rule, then=self._after)(plain)

    def _after(self, cache: Any, *args: Any, **kwargs: Any) -> None:
        """Book what a method has stored in ``cache``; in one layer of it, if it was told which."""
        layer = kwargs.get("layer_idx")
        if layer is None:
            for layer in args:
                if type(layer) is int:
                    break
            else:
                layer = None
        self._stored(cache, layer, (*args, *kwargs.values()))

    def _stored(self, cache: object, layer: int | None = None, given: tuple[Any, ...] = ()) -> None:
        """Book what a cache keeps.

        What a layer that was booked before has new was made where caches store, and so belongs
        there, unless it is what the method was ``given``.
        """
        attributes = attributes_of(cache)
        layers = attributes.get("layers")
        if not isinstance(layers, list):  # one list or mapping by layer for each kind of state
            for value in list(attributes.values()):
                self._book(_item(value, layer), _FULL)
            return
        handed = set(map(id, given))
        for one in layers if layer is None else layers[layer : layer + 1]:
            again = self._was_booked(one)
            for name, value in list(attributes_of(one).items()):
                compact = name.startswith("_quantized")
                if compact or not again or id(value) in handed:
                    self._book(value, _COMPACT if compact else _FULL)

    def _was_booked(self, layer: object) -> bool:
        try:
            if layer in self._booked:
                return True
            self._booked.add(layer)
        except TypeError:  # of a class that can't be hashed or referred to weakly
            pass
        return False

    def _book(self, value: object, component: str) -> None:
        # Most attributes are one tensor or none, and this runs at every step of every layer.
        if isinstance(value, Tensor):
            self._wrapping.source().retag(value, component, only=_TAKEN_FROM[component])
        elif isinstance(value, _CONTAINERS):
            for tensor in _tensors(value):
                self._book(tensor, component)


def attributes_of(value: object) -> dict[str, Any]:
    """What an object keeps, read without running any code of its class."""
    try:
        found: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found


def _item(value: object, layer: int | None) -> object:
    """What belongs to one layer in a list or mapping by layer; all of it without a layer."""
    if layer is None or not isinstance(value, (list, dict)):
        return value
    try:
        return value[layer]
    except (IndexError, KeyError):
        return None


def _tensors(value: object, depth: int = 3) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, _CONTAINERS):
        for item in list(value.values() if isinstance(value, dict) else value):
            yield from _tensors(item, depth - 1)
