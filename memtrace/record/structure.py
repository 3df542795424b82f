"""What the modules of a model are to the accounting, read off their classes and places.

==================  ==========================  ==================================================
what                component                   wrong when
==================  ==========================  ==================================================
decoder layers      Act; their output, and the  layers are no ``…Layer``/``…Block`` in a ModuleList
                    first one's input, Hidden   or change their input in place
stacks of layers    Act; their output Hidden    (only where a model has several, as an encoder and
                                                a decoder)
attention, MLP,     Act, with their own scope   their classes are called otherwise
experts, router …
embeddings          Hidden                      it is no ``nn.Embedding`` and the model has no
                                                ``get_input_embeddings()``
output embedding    Temp (logits)               the model has no ``get_output_embeddings()`` and
                                                another linear layer is as wide as the vocabulary
==================  ==========================  ==================================================
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

_LAYER = re.compile(r"(Layer|Block)$")
_PART = re.compile(
    r"Attention|Attn|MLP|FeedForward|LayerFF|FFN|Mixer|Moe|MoE|Expert|Router|Rotary|GatedDelta"
)


@dataclass(frozen=True)
class Part:
    """A module with a meaning: the component and the scopes of what it allocates."""

    module: nn.Module
    component: str
    scopes: tuple[tuple[str, str], ...]
    #: What its first argument, and its output, belong to if they are workspace so far.
    input: str | None = None
    output: str | None = None

    @property
    def is_layer(self) -> bool:
        return self.scopes[0][0] == "layer"


def parts(root: nn.Module) -> list[Part]:
    """The parts below ``root``; of two for one module the later one holds.

    Asks PyTorch's own methods, since models override them with other signatures.
    """
    modules = dict(nn.Module.named_modules(root))
    layers = {path: module for path, module in modules.items() if _is_layer(modules, path)}
    found = list(_stacks(modules, layers))
    for path, module in modules.items():
        name = path.rpartition(".")[2]
        if path in layers:
            first = "Hidden" if name == "0" else None
            found.append(_part(module, "Act", ("layer", name), input=first, output="Hidden"))
        elif path and _PART.search(type(module).__name__):
            found.append(_part(module, "Act", ("module", _name(path))))
    within = {id(inner) for layer in layers.values() for inner in nn.Module.modules(layer)}
    outside = {path: module for path, module in modules.items() if id(module) not in within}
    return [*found, *_embeddings(root, outside)]


def _is_layer(modules: dict[str, nn.Module], path: str) -> bool:
    parent, _, name = path.rpartition(".")
    return (
        name.isdecimal()
        and isinstance(modules.get(parent), nn.ModuleList)
        and _LAYER.search(type(modules[path]).__name__) is not None
    )


def _stacks(modules: dict[str, nn.Module], layers: dict[str, nn.Module]) -> Iterator[Part]:
    """What owns a list of layers, where there are several and none lies in another's layer."""
    owners = dict.fromkeys(path.rpartition(".")[0].rpartition(".")[0] for path in layers)
    outer = [path for path in owners if not any(path.startswith(f"{one}.") for one in layers)]
    if len(outer) > 1:
        for path in outer:
            if path:
                yield _part(modules[path], "Act", ("module", _name(path)), output="Hidden")


def _embeddings(root: nn.Module, outside: dict[str, nn.Module]) -> Iterator[Part]:
    """The embeddings at both ends of a model, among the modules ``outside`` its layers."""
    tables = {p: m for p, m in outside.items() if p and isinstance(m, nn.Embedding)}
    for path, module in tables.items():
        yield _part(module, "Hidden", ("module", _name(path)))
    source = _asked(root, "input")
    if source is not None:
        yield _part(source, "Hidden", ("module", "embedding"))
    head = _asked(root, "output")
    if head is None:
        widths = {table.num_embeddings for table in tables.values()}
        heads = (m for m in outside.values() if isinstance(m, nn.Linear))
        head = next((module for module in heads if module.out_features in widths), None)
    if head is not None:
        yield _part(head, "Temp", ("module", "lm_head"))


def _asked(root: nn.Module, which: str) -> nn.Module | None:
    """What transformers calls the input or output embedding of a model; None without one."""
    getter = getattr(root, f"get_{which}_embeddings", None)
    try:
        found = getter() if getter is not None else None
    except Exception:  # the user's method: of other arguments, unfinished, whatever
        return None
    return found if isinstance(found, nn.Module) else None


def _name(path: str) -> str:
    """``experts.3`` for an item of a list, otherwise the last name."""
    parent, _, name = path.rpartition(".")
    return f"{parent.rpartition('.')[2]}.{name}" if name.isdecimal() and parent else name


def _part(
    module: nn.Module,
    component: str,
    scope: tuple[str, str],
    *,
    input: str | None = None,
    output: str | None = None,
) -> Part:
    return Part(module, component, (scope, ("class", type(module).__name__)), input, output)
