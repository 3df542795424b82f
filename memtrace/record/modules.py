"""Automatic attribution: which component the bytes of an ordinary PyTorch script belong to.

Inside an explicit :func:`memtrace.scopes.component` no rule applies. Each rule is a heuristic:

====================  ==========================  ================================================
rule                  component                   wrong when
====================  ==========================  ================================================
parameters            model                       a module registers workspace as a buffer
modules of torch.nn   model, while they are made  a parameter is made elsewhere: other, until it
and converted                                     is registered
``from_pretrained``   model/loading, until then   weights are loaded by other means (then other)
forward of a model    Act                         the model keeps what it computes
parts of a model      :mod:`.structure`           see there
logits it returns     Temp                        it returns no ``logits`` by that name
last hidden state     Hidden                      likewise
caches                :mod:`.caches`              see there
attention masks       backend                     not made by ``transformers.masking_utils``
``generate()``        Temp (sampling)             the user samples in a loop of their own (then
                                                  other)
anything else         other                       (backward passes and optimizers, too)
====================  ==========================  ================================================
"""

import sys
import weakref
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

from memtrace.record.caches import Caches, attributes_of
from memtrace.record.imports import when_imported
from memtrace.record.rule import Function, Rule, Wrapping
from memtrace.record.source import Source
from memtrace.record.structure import Part, parts

#: What models call their results, and where those belong if they are workspace so far.
_RESULTS = (
    ("logits", "Temp"),
    ("last_hidden_state", "Hidden"),
    ("encoder_last_hidden_state", "Hidden"),
)
_WORKSPACE = ("Act",)

#: What a class of torch.nn has if it makes parameters.
_MAKING = {"reset_parameters", "_reset_parameters"}


class _Role:
    """What a module is to the accounting, as long as it lives."""

    __slots__ = ("input", "module", "output", "rule")

    def __init__(self, part: Part) -> None:
        self.module = weakref.ref(part.module)
        self.rule = Rule(part.component, *part.scopes)
        self.input = part.input
        self.output = part.output


@dataclass(frozen=True)
class _Root:
    """A module that was called from outside any other, and its rules."""

    module: weakref.ref[nn.Module]
    one: Rule  # its input holds one token
    several: Rule


class Rules:
    """Installs the rules into PyTorch and transformers, and takes them out again.

    Args:
        wrapping: puts functions inside rules.
    """

    def __init__(self, wrapping: Wrapping) -> None:
        #: The language models that ran: class, layers, number and bytes of their parameters.
        self.models: list[dict[str, Any]] = []
        self._wrapping = wrapping
        self._caches = Caches(self._wrapping)
        self._roles: dict[int, _Role] = {}
        self._roots: dict[int, _Root] = {}

    def install(self) -> None:
        """Apply the rules from now on."""
        wrapping = self._wrapping
        for hook in (
            register_module_parameter_registration_hook(self._registered),
            register_module_buffer_registration_hook(self._registered),
        ):
            wrapping.undo.append(hook.remove)
        wrapping.wrap(nn.Module, "__call__", self._call)
        self._follow_making()
        for name, follow in (
            ("cache_utils", self._caches.follow_library),
            ("masking_utils", self._follow_masks),
            ("generation.utils", self._follow_generate),
            ("modeling_utils", self._follow_loading),
        ):
            wrapping.undo.append(when_imported(f"transformers.{name}", follow))

    def remove(self) -> None:
        """Apply them no longer."""
        self._wrapping.remove()

    # -- modules -----------------------------------------------------------------------------

    def _registered(self, module: nn.Module, name: str, tensor: Tensor | None) -> None:
        if tensor is not None and not is_lazy(tensor) and not self._wrapping.place.get().explicit:
            self._wrapping.source().retag(tensor, "model")

    def _follow_making(self) -> None:
        """Parameters are the model's before they are registered, and after ``.to()``."""
        in_model = self._wrapping.in_rule(Rule("model"))
        for owner in _descendants(nn.Module):
            own = vars(owner).keys()
            if owner.__module__.startswith("torch.nn.") and "__init__" in own and own & _MAKING:
                self._wrapping.wrap(owner, "__init__", in_model)
        self._wrapping.wrap(nn.Module, "_apply", in_model)

    def _call(self, plain: Function) -> Function:
        wrapping = self._wrapping
        roles, place, ledger = self._roles, wrapping.place, wrapping.ledger
        frame_of = place.get

        def __call__(*args: Any, **kwargs: Any) -> Any:  # the module, and what it is called with
            frame = frame_of()
            if not frame.inside:
                rule = self._root(args[0], args[1:], kwargs)
                out = rule.run(place, ledger, plain, args, kwargs)
                self._returned(out)
                return out
            role = roles.get(id(args[0]))
            if role is None or frame.explicit or role.module() is not args[0]:
                return plain(*args, **kwargs)
            if role.input is not None:
                self._take(args[1] if len(args) > 1 else kwargs.get("hidden_states"), role.input)
            out = role.rule.run(place, ledger, plain, args, kwargs)
            if role.output is not None:
                self._take(out, role.output)
            return out

        return __call__

    def _take(self, value: Any, component: str) -> None:
        """What a module was given or returned first belongs to ``component``, not to workspace."""
        if isinstance(value, tuple) and value:
            value = value[0]
        elif isinstance(value, dict):
            value = attributes_of(value).get("last_hidden_state")
        if isinstance(value, Tensor):
            self._wrapping.source().retag(value, component, only=_WORKSPACE)

    def _returned(self, out: Any) -> None:
        """Book what a model returned."""
        if isinstance(out, Tensor):
            return
        # Not by the methods of its class: those of transformers warn about names.
        named = {**(out if type(out) is dict else {}), **attributes_of(out)}
        for name, component in _RESULTS:
            self._take(named.get(name), component)
        self._caches.returned(named)

    def _root(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Rule:
        """The rule of a module that is called from outside any other: a model."""
        source = self._wrapping.source()
        root = self._roots.get(id(module))
        if root is None or root.module() is not module:
            one, several = self._discover(module, source)
            root = self._roots[id(module)] = _Root(weakref.ref(module), one, several)
        self._caches.handed(kwargs)
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                source.adopt(value, "other")
        prompt = kwargs.get("input_ids")
        if prompt is None:
            prompt = kwargs.get("inputs_embeds", args[0] if args else None)
        with torch._C.DisableTorchFunction():
            # (B, L) token ids or (B, L, d) embeddings
            many = isinstance(prompt, Tensor) and prompt.dim() > 1 and prompt.size(1) > 1
        return root.several if many else root.one

    def _discover(self, root: nn.Module, source: Source) -> tuple[Rule, Rule]:
        """Give the modules below ``root`` their roles and its parameters to ``model``.

        Returns:
            The root's rule for one token (decode) and for several (prefill).
        """
        parameters = [p for p in nn.Module.parameters(root) if not is_lazy(p)]
        for tensor in (*parameters, *nn.Module.buffers(root)):
            source.retag(tensor, "model")
        layers = 0
        for part in parts(root):
            layers += part.is_layer
            self._roles[id(part.module)] = _Role(part)
        name = type(root).__name__
        scopes = (("module", name), ("class", name))
        if not layers:
            return (Rule("Act", *scopes),) * 2
        self.models.append(
            {
                "class": name,
                "layers": layers,
                "parameters": sum(p.numel() for p in parameters),
                "bytes": sum(p.numel() * p.element_size() for p in parameters),
            }
        )
        return Rule("Act", ("phase", "decode"), *scopes), Rule("Act", ("phase", "prefill"), *scopes)

    # -- transformers ------------------------------------------------------------------------

    def _follow_masks(self, module: ModuleType) -> None:
        in_backend = self._wrapping.in_rule(Rule("backend", ("module", "mask")))
        makers = {
            name: plain
            for name, plain in vars(module).items()
            if name.startswith("create_") and "_mask" in name
        }
        for user in list(sys.modules.values()):  # models that imported one before now hold on to it
            names = attributes_of(user)
            for name, plain in makers.items():
                held = names.get(name)
                if held is plain or getattr(held, "__wrapped__", None) is plain:
                    self._wrapping.wrap(user, name, in_backend)

    def _follow_generate(self, module: ModuleType) -> None:
        in_temp = self._wrapping.in_rule(Rule("Temp"))
        self._wrapping.wrap(module.GenerationMixin, "generate", in_temp)

    def _follow_loading(self, module: ModuleType) -> None:
        loading = self._wrapping.in_rule(Rule("model/loading", ("phase", "loading")))
        self._wrapping.wrap(module.PreTrainedModel, "from_pretrained", loading)


def _descendants(owner: type) -> set[type]:
    below: set[type] = set(owner.__subclasses__())
    return below.union(*map(_descendants, below))
