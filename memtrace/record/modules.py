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
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

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

    def within(self, source: TensorSource, ledger: Ledger) -> Within:
        """The rule's frame for the length of a ``with`` block."""
        outer = source.frame
        inner = self.frames.get(outer)
        if inner is None:
            scope = outer.scope
            for kind, name in self.scopes:
                if kind != "phase" or "phase" not in outer.kinds:  # the user's own phase stands
                    scope = ledger.scope(scope, kind, name)
            inner = self.frames[outer] = ledger.frame(self.component, scope, explicit=False)
        return Within(source, inner)


class _Role:
    """What a module is to the accounting: the rule of its forward, and what its output becomes."""

    __slots__ = ("module", "output", "rule")

    def __init__(self, module: nn.Module, rule: Rule, output: str | None = None) -> None:
        self.module = weakref.ref(module)
        self.rule = rule
        self.output = output


class Rules:
    """Installs the rules into PyTorch and transformers, and takes them out again.

    Args:
        ledger: the books.
        source: gives the calling thread's tensor source.
    """

    def __init__(self, ledger: Ledger, source: Callable[[], TensorSource]) -> None:
        #: The language models that ran: class, layers, number and bytes of their parameters.
        self.models: list[dict[str, Any]] = []
        self._ledger = ledger
        self._source = source
        self._roles: dict[int, _Role] = {}
        self._roots: weakref.WeakKeyDictionary[nn.Module, tuple[Rule, Rule]] = (
            weakref.WeakKeyDictionary()
        )
        self._undo: list[Callable[[], object]] = []
        self._installed = False

    def install(self) -> None:
        """Apply the rules from now on."""
        self._installed = True
        for hook in (
            register_module_parameter_registration_hook(self._registered),
            register_module_buffer_registration_hook(self._registered),
        ):
            self._undo.append(hook.remove)
        self._wrap(nn.Module, "__call__", self._call)
        when_imported("transformers.cache_utils", self._follow_caches)
        when_imported("transformers.masking_utils", self._follow_masks)
        when_imported("transformers.generation.utils", self._follow_generate)
        when_imported("transformers.modeling_utils", self._follow_loading)

    def remove(self) -> None:
        """Apply them no longer."""
        self._installed = False
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
        source = self._source()
        if tensor is not None and not source.frame.explicit:
            source.retag(tensor, "model")

    def _call(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        roles, source_of, ledger = self._roles, self._source, self._ledger

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            source = source_of()
            if source.frame.explicit:
                return plain(module, *args, **kwargs)
            if "module" not in source.frame.kinds:
                rule = self._root(module, source, args, kwargs)
                with rule.within(source, ledger):
                    return plain(module, *args, **kwargs)
            role = roles.get(id(module))
            if role is None or role.module() is not module:
                return plain(module, *args, **kwargs)
            with role.rule.within(source, ledger):
                out = plain(module, *args, **kwargs)
            if role.output is not None:
                first = out[0] if isinstance(out, tuple) else out
                if isinstance(first, Tensor) and source.component_of(first) == "Act":
                    source.retag(first, role.output)
            return out

        return __call__

    def _root(
        self, module: nn.Module, source: TensorSource, args: Any, kwargs: dict[str, Any]
    ) -> Rule:
        """The rule of a module that is called from outside any other: a model."""
        rules = self._roots.get(module)
        if rules is None:
            rules = self._roots[module] = self._discover(module, source)
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and source.component_of(value) is None:
                source.retag(value, "other")
        # (B, L) token ids or (B, L, d) embeddings.
        prompt = kwargs.get("input_ids")
        if prompt is None:
            prompt = kwargs.get("inputs_embeds", args[0] if args else None)
        return rules[isinstance(prompt, Tensor) and prompt.ndim > 1 and prompt.shape[1] > 1]

    def _discover(self, root: nn.Module, source: TensorSource) -> tuple[Rule, Rule]:
        """Give the modules below ``root`` their roles and its parameters to ``model``.

        Returns:
            The root's rule for one token (decode) and for several (prefill).
        """
        for tensor in (*root.parameters(), *root.buffers()):
            source.retag(tensor, "model")
        layers = 0
        for name, module in root.named_modules():
            parent, _, last = name.rpartition(".")
            class_name = type(module).__name__
            listed = last.isdecimal() and isinstance(root.get_submodule(parent), nn.ModuleList)
            if listed and _LAYER.search(class_name):
                layers += 1
                self._assign(module, Rule("Act", ("layer", last)), output="Hidden")
            elif _PART.search(class_name):
                self._assign(module, Rule("Act", ("module", last)))
        self._assign(_embedding(root, "input"), Rule("Hidden", ("module", "embedding")))
        self._assign(_embedding(root, "output"), Rule("Temp", ("module", "lm_head")))
        scope = ("module", type(root).__name__)
        if not layers:
            return (Rule("Act", scope),) * 2
        parameters = list(root.parameters())
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
                source = self._source()
                if source.frame.explicit:
                    return plain(cache, *args, **kwargs)
                with rule.within(source, self._ledger):
                    out = plain(cache, *args, **kwargs)
                layer = kwargs["layer_idx"] if "layer_idx" in kwargs else args[2]
                for name in ("keys", "values"):
                    stored = getattr(cache.layers[layer], name, None)
                    if isinstance(stored, Tensor):
                        component = source.component_of(stored) or ""
                        if not component.startswith("KV_res"):
                            source.retag(stored, "KV_res/full")
                return out

            return update

        if self._installed:
            self._wrap(module.Cache, "update", follow)

    def _follow_masks(self, module: ModuleType) -> None:
        if self._installed:
            rule = Rule("backend", ("module", "mask"))
            for name in list(vars(module)):
                if name.startswith("create_") and name.endswith("_mask"):
                    self._wrap(module, name, self._in_rule(rule))

    def _follow_generate(self, module: ModuleType) -> None:
        if self._installed:
            self._wrap(module.GenerationMixin, "generate", self._in_rule(Rule("Temp")))

    def _follow_loading(self, module: ModuleType) -> None:
        if self._installed:
            rule = Rule("model/loading", ("phase", "loading"))
            self._wrap(module.PreTrainedModel, "from_pretrained", self._in_rule(rule))

    def _in_rule(self, rule: Rule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(plain)
            def ruled(*args: Any, **kwargs: Any) -> Any:
                source = self._source()
                if source.frame.explicit:
                    return plain(*args, **kwargs)
                with rule.within(source, self._ledger):
                    return plain(*args, **kwargs)

            return ruled

        return wrap


def _embedding(root: nn.Module, which: str) -> nn.Module | None:
    """What transformers calls the input or output embedding of a model; None without one."""
    try:
        found = getattr(root, f"get_{which}_embeddings")()
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, nn.Module) else None
