"""Automatic attribution: which component the bytes of an ordinary PyTorch script belong to.

Inside an explicit :func:`memtrace.scopes.component` no rule applies. Each rule is a heuristic:

==================  ==========================  ==================================================
rule                component                   wrong when
==================  ==========================  ==================================================
parameters          model                       a module registers workspace as a buffer
``from_pretrained`` model/loading, until then   weights are loaded by other means (then other)
forward of a model  Act                         the model keeps what it computes (a custom cache)
decoder layers      Act; their output Hidden    layers are no ``…Layer``/``…Block`` in a ModuleList
attention, MLP      Act, with their own scope   their classes are called otherwise
input embedding     Hidden                      the model has no ``get_input_embeddings()``
output embedding    Temp (logits)               likewise, ``get_output_embeddings()``
transformers cache  KV_res/full                 the cache does not derive from ``Cache``
attention masks     backend                     not made by ``transformers.masking_utils``
``generate()``      Temp (sampling)             the user samples in a loop of their own (then other)
==================  ==========================  ==================================================
"""

import functools
import re
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from memtrace.record.imports import when_imported
from memtrace.record.ledger import Frame, Ledger
from memtrace.record.tensors import TensorSource, Within

_LAYER = re.compile(r"(Layer|Block)$")
_PART = re.compile(r"Attention|Attn|MLP|FeedForward|FFN|Moe|MoE")


class Rule:
    """A component and a scope that a rule enters, with the frames they led to so far."""

    __slots__ = ("component", "frames", "scopes")

    def __init__(self, component: str, *scopes: tuple[str, str]) -> None:
        self.component = component
        self.scopes = scopes
        self.frames: dict[Frame, Frame] = {}

    def within(self, place: ContextVar[Frame], ledger: Ledger) -> Within:
        """The rule's frame for the length of a ``with`` block."""
        outer = place.get()
        inner = self.frames.get(outer)
        if inner is None:
            scope = outer.scope
            for kind, name in self.scopes:
                if kind != "phase" or "phase" not in outer.kinds:  # the user's own phase stands
                    scope = ledger.scope(scope, kind, name)
            inner = self.frames[outer] = ledger.frame(self.component, scope, explicit=False)
        return Within(place, inner)


class _Role:
    """What a module is to the accounting: the rule of its forward, and what its output becomes."""

    __slots__ = ("module", "output", "rule")

    def __init__(self, module: nn.Module, rule: Rule, output: str | None = None) -> None:
        self.module = weakref.ref(module)
        self.rule = rule
        self.output = output


@dataclass(frozen=True)
class _Root:
    """A module that was called from outside any other, and its rules."""

    module: weakref.ref[nn.Module]
    one: Rule  # its input holds one token
    several: Rule


class Rules:
    """Installs the rules into PyTorch and transformers, and takes them out again.

    Args:
        ledger: the books.
        place: holds the frame that the running code stands in.
        source: gives the calling thread's tensor source.
    """

    def __init__(
        self, ledger: Ledger, place: ContextVar[Frame], source: Callable[[], TensorSource]
    ) -> None:
        #: The language models that ran: class, layers, number and bytes of their parameters.
        self.models: list[dict[str, Any]] = []
        self._ledger = ledger
        self._place = place
        self._source = source
        self._roles: dict[int, _Role] = {}
        self._roots: dict[int, _Root] = {}
        self._undo: list[Callable[[], object]] = []

    def install(self) -> None:
        """Apply the rules from now on."""
        for hook in (
            register_module_parameter_registration_hook(self._registered),
            register_module_buffer_registration_hook(self._registered),
        ):
            self._undo.append(hook.remove)
        self._wrap(nn.Module, "__call__", self._call)
        for name, follow in (
            ("cache_utils", self._follow_caches),
            ("masking_utils", self._follow_masks),
            ("generation.utils", self._follow_generate),
            ("modeling_utils", self._follow_loading),
        ):
            self._undo.append(when_imported(f"transformers.{name}", follow))

    def remove(self) -> None:
        """Apply them no longer."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _wrap(
        self, owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        plain = vars(owner)[name]
        is_classmethod = isinstance(plain, classmethod)
        wrapped: Any = classmethod(wrapper(plain.__func__)) if is_classmethod else wrapper(plain)
        setattr(owner, name, wrapped)

        def undo() -> None:
            if vars(owner)[name] is wrapped:  # else somebody wrapped it in turn: leave theirs
                setattr(owner, name, plain)

        self._undo.append(undo)

    # -- modules -----------------------------------------------------------------------------

    def _registered(self, module: nn.Module, name: str, tensor: Tensor | None) -> None:
        if tensor is not None and not is_lazy(tensor) and not self._place.get().explicit:
            self._source().retag(tensor, "model")

    def _call(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        roles, place, ledger = self._roles, self._place, self._ledger
        frame_of = place.get

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            frame = frame_of()
            if frame.explicit:
                return plain(module, *args, **kwargs)
            if "module" not in frame.kinds:
                with self._root(module, args, kwargs).within(place, ledger):
                    return plain(module, *args, **kwargs)
            role = roles.get(id(module))
            if role is None or role.module() is not module:
                return plain(module, *args, **kwargs)
            with role.rule.within(place, ledger):
                out = plain(module, *args, **kwargs)
            if role.output is not None:
                source = self._source()
                first = out[0] if isinstance(out, tuple) and out else out
                if isinstance(first, Tensor) and source.component_of(first) == "Act":
                    source.retag(first, role.output)
            return out

        return __call__

    def _root(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Rule:
        """The rule of a module that is called from outside any other: a model."""
        source = self._source()
        root = self._roots.get(id(module))
        if root is None or root.module() is not module:
            one, several = self._discover(module, source)
            root = self._roots[id(module)] = _Root(weakref.ref(module), one, several)
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and source.component_of(value) is None:
                source.retag(value, "other")
        prompt = kwargs.get("input_ids")
        if prompt is None:
            prompt = kwargs.get("inputs_embeds", args[0] if args else None)
        with torch._C.DisableTorchFunction():
            # (B, L) token ids or (B, L, d) embeddings
            many = isinstance(prompt, Tensor) and prompt.dim() > 1 and prompt.size(1) > 1
        return root.several if many else root.one

    def _discover(self, root: nn.Module, source: TensorSource) -> tuple[Rule, Rule]:
        """Give the modules below ``root`` their roles and its parameters to ``model``.

        Asks PyTorch's own methods, since models override them with other signatures.

        Returns:
            The root's rule for one token (decode) and for several (prefill).
        """
        parameters = [p for p in nn.Module.parameters(root) if not is_lazy(p)]
        for tensor in (*parameters, *nn.Module.buffers(root)):
            source.retag(tensor, "model")
        layers = 0
        for parent in nn.Module.modules(root):
            for name, module in parent._modules.items():
                class_name = type(module).__name__
                if isinstance(parent, nn.ModuleList) and _LAYER.search(class_name):
                    layers += 1
                    self._assign(module, Rule("Act", ("layer", name)), output="Hidden")
                elif _PART.search(class_name):
                    self._assign(module, Rule("Act", ("module", name)))
        self._assign(_embedding(root, "input"), Rule("Hidden", ("module", "embedding")))
        self._assign(_embedding(root, "output"), Rule("Temp", ("module", "lm_head")))
        scope = ("module", type(root).__name__)
        if not layers:
            return (Rule("Act", scope),) * 2
        self.models.append(
            {
                "class": type(root).__name__,
                "layers": layers,
                "parameters": sum(p.numel() for p in parameters),
                "bytes": sum(p.numel() * p.element_size() for p in parameters),
            }
        )
        return Rule("Act", ("phase", "decode"), scope), Rule("Act", ("phase", "prefill"), scope)

    def _assign(self, module: nn.Module | None, rule: Rule, output: str | None = None) -> None:
        if module is not None:
            self._roles[id(module)] = _Role(module, rule, output)

    # -- transformers ------------------------------------------------------------------------

    def _follow_caches(self, module: ModuleType) -> None:
        rule = Rule("KV_res/full", ("module", "cache"))

        def follow(plain: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(plain)
            def update(cache: Any, *args: Any, **kwargs: Any) -> Any:
                if self._place.get().explicit:
                    return plain(cache, *args, **kwargs)
                with rule.within(self._place, self._ledger):
                    out = plain(cache, *args, **kwargs)
                source = self._source()
                layer = kwargs["layer_idx"] if "layer_idx" in kwargs else args[2]
                for name in ("keys", "values"):
                    stored = getattr(cache.layers[layer], name, None)
                    if isinstance(stored, Tensor):
                        component = source.component_of(stored) or ""
                        if not component.startswith("KV_res"):
                            source.retag(stored, "KV_res/full")
                return out

            return update

        self._wrap(module.Cache, "update", follow)

    def _follow_masks(self, module: ModuleType) -> None:
        rule = Rule("backend", ("module", "mask"))
        for name in list(vars(module)):
            if name.startswith("create_") and name.endswith("_mask"):
                self._wrap(module, name, self._in_rule(rule))

    def _follow_generate(self, module: ModuleType) -> None:
        self._wrap(module.GenerationMixin, "generate", self._in_rule(Rule("Temp")))

    def _follow_loading(self, module: ModuleType) -> None:
        rule = Rule("model/loading", ("phase", "loading"))
        self._wrap(module.PreTrainedModel, "from_pretrained", self._in_rule(rule))

    def _in_rule(self, rule: Rule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(plain)
            def ruled(*args: Any, **kwargs: Any) -> Any:
                if self._place.get().explicit:
                    return plain(*args, **kwargs)
                self._source()  # this may be the first that the thread does under recording
                with rule.within(self._place, self._ledger):
                    return plain(*args, **kwargs)

            return ruled

        return wrap


def _embedding(root: nn.Module, which: str) -> nn.Module | None:
    """What transformers calls the input or output embedding of a model; None without one."""
    getter = getattr(root, f"get_{which}_embeddings", None)
    try:
        found = getter() if getter is not None else None
    except Exception:  # the user's method: of other arguments, unfinished, whatever
        return None
    return found if isinstance(found, nn.Module) else None
