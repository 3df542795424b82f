"""The sizes of a decoder that decide its memory, read off its configuration without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from memtrace.allocator.settings import parse_version
from tidekv.errors import LoadError

_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}
#: Families of pre-norm, rotary attention and a gated MLP, and what their layers have besides.
_BIASES, _HEAD_NORMS = frozenset({"qwen2"}), frozenset({"qwen3"})
FAMILIES = frozenset({"llama", "mistral"}) | _BIASES | _HEAD_NORMS


@dataclass(frozen=True)
class Shape:
    """One decoder.

    Attributes:
        family: ``config.model_type``.
        layers: N.
        hidden: d.
        mlp: d_ff.
        query_heads, kv_heads, head: Hq, Hkv and D.
        vocabulary: V.
        tied: whether the head is the embeddings.
        dtype: of a number.
    """

    family: str
    layers: int
    hidden: int
    mlp: int
    query_heads: int
    kv_heads: int
    head: int
    vocabulary: int
    tied: bool
    dtype: str

    @property
    def element(self) -> int:
        """Bytes of a number, b."""
        return _ELEMENT[self.dtype]

    @property
    def attention(self) -> int:
        """Width of all query heads, Hq·D."""
        return self.query_heads * self.head

    @property
    def normalises_heads(self) -> bool:
        """Whether queries and keys are normalised per head before the rotation."""
        return self.family in _HEAD_NORMS

    def weights(self) -> list[int]:
        """Bytes of each parameter and buffer."""
        return [*self.ends(), *self.layer() * self.layers, *self.rotary()]

    def layer(self) -> list[int]:
        """Bytes of each parameter of a layer.

        Projections Hq·D·d (twice) and Hkv·D·d (twice), the MLP's 3·d_ff·d, norms 2·d. Qwen2 has
        biases of the three projections, Qwen3 norms of queries' and keys' heads.
        """
        d, queries, keys = self.hidden, self.attention, self.kv_heads * self.head
        numbers = [queries * d, keys * d, keys * d, d * queries, *[self.mlp * d] * 3, d, d]
        if self.family in _BIASES:
            numbers += [queries, keys, keys]
        if self.normalises_heads:
            numbers += [self.head, self.head]
        return [self.element * one for one in numbers]

    def ends(self) -> list[int]:
        """Bytes of the last norm, d, of the head, V·d, and of embeddings that aren't tied to it."""
        numbers = [self.hidden, *[self.vocabulary * self.hidden] * (1 if self.tied else 2)]
        return [self.element * one for one in numbers]

    def rotary(self) -> list[int]:
        """Bytes of each buffer of the rotary embedding, D/2 numbers in fp32."""
        return [2 * self.head] * _rotary_buffers()


@lru_cache(maxsize=1)
def _rotary_buffers() -> int:
    """From transformers 5 on it keeps the frequencies twice."""
    return 2 if int(version("transformers").partition(".")[0]) >= 5 else 1


@lru_cache(maxsize=1)
def groups_efficiently() -> bool:
    """Whether ``scaled_dot_product_attention`` has its memory-efficient kernel take fewer heads of
    keys than of queries, as from torch 2.14 on; before, it takes plain operators."""
    return parse_version(version("torch")) >= (2, 14)


def shape_of(config: Mapping[str, Any], dtype: str | None = None) -> Shape | None:
    """The shape that a ``config.json`` describes; None: its family or its dtype isn't known.

    Args:
        dtype: of the weights; None: what the configuration says.

    Raises:
        LoadError: the configuration lacks a size, or has one that is none.
    """
    said = dtype or config.get("dtype") or config.get("torch_dtype")
    if config.get("model_type") not in FAMILIES or said not in _ELEMENT:
        return None
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    return Shape(
        family=config["model_type"],
        layers=_size(config, "num_hidden_layers"),
        hidden=hidden,
        mlp=_size(config, "intermediate_size"),
        query_heads=heads,
        kv_heads=_size(config, "num_key_value_heads", heads),
        head=_size(config, "head_dim", hidden // heads),
        vocabulary=_size(config, "vocab_size"),
        tied=config.get("tie_word_embeddings", False),
        dtype=said,
    )


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A size by its name.

    Raises:
        LoadError: there is none, and no default, or it is no number above 0.
    """
    size = config.get(name)
    if size is None:
        if default is None:
            raise LoadError(f"The model's configuration has no {name}.")
        return default
    if type(size) is not int or size < 1:
        raise LoadError(f"The model's configuration has {size!r} for {name}, which is no size.")
    return size
