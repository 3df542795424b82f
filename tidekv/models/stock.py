"""Any family, through the model's own forward with one layer at a time.

The forward of the base model runs with its list of layers cut to the one that advances and with no
final norm, on a chunk of hidden states. What stands in for its cache writes keys and values where
the schedule wants them, and what stands in for its attention function is ours: so positions,
scaling, norms and residuals are the family's own.

Shapes: B batch, C rows of a chunk, S prompt rows, d hidden size, Hq query heads, Hkv KV heads,
D head size, V vocabulary.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from tidekv import compat
from tidekv.attention import Backend
from tidekv.models.placement import Slots, visiting

#: cos and sin, each (1, C, D).
RopeTable = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Span:
    """Rows start..stop-1 of a prompt of ``total``."""

    start: int
    stop: int
    total: int


class Store(Protocol):
    """Where the keys and values of one layer go."""

    def write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append rows: (B, Hkv, C, D) each."""

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows that attention sees, the newest last: (B, Hkv, P, D) each."""


class Watch(Protocol):
    """What wants to know of a layer while it runs."""

    #: How many of the prompt's last rows of queries it wants; None: all.
    query_rows: int | None
    #: How many of the last rows of inputs it wants.
    input_rows: int

    def queries(self, index: int, queries: torch.Tensor, store: Store) -> None:
        """Rotated queries (B, Hq, C, D), whose keys are the last ones in ``store``."""

    def inputs(self, index: int, normed: torch.Tensor) -> None:
        """What the attention module is given: (B, C, d)."""


@dataclass(frozen=True)
class Step:
    """One layer for one chunk: what runs, and what it writes to and tells."""

    index: int
    span: Span
    store: Store
    watch: Watch
    backend: Backend


class StockDecoder:
    """The parts of a causal language model that a schedule drives."""

    def __init__(self, model: Any, device: torch.device | None = None) -> None:
        """
        Args:
            device: where the prompt is computed, if not where the layers are. What of the model
                is elsewhere visits it.
        """
        config = model.config
        self.model = model
        self.base = model.base_model
        self.layers: list[Any] = list(self.base.layers)
        #: Where the prompt is computed.
        self.device = device or next(self.layers[0].parameters()).device
        self.query_heads: int = config.num_attention_heads
        self.kv_heads: int = getattr(config, "num_key_value_heads", None) or self.query_heads
        self.head_dim: int = getattr(config, "head_dim", None) or (
            config.hidden_size // self.query_heads
        )
        #: Whether layers visit the device one after the other.
        self.stream_weights = False
        #: Rows that norms, projections and the MLP take at a time, where a layer is taken apart.
        self.piece_rows = 1 << 62
        self._slots: Slots | None = None
        self._norm = "final_layer_norm" if hasattr(self.base, "final_layer_norm") else "norm"
        self.softcap: float | None = getattr(config, "attn_logit_softcapping", None)

    @property
    def final_norm(self) -> nn.Module:
        """The norm behind the last layer."""
        norm: nn.Module = getattr(self.base, self._norm)
        return norm

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def rotary(self) -> Any:
        """The model's own rotary embedding, whatever stands in for it."""
        found = self.base.rotary_emb
        return found.plain if isinstance(found, _Rotary) else found

    def attention(self, index: int) -> Any:
        """The attention module of a layer."""
        layer = self.layers[index]
        return layer.self_attn if hasattr(layer, "self_attn") else layer.attention

    def scaling(self, index: int) -> float:
        """The factor on the attention logits of a layer."""
        return float(self.attention(index).scaling)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Take the model over, and give it back as it was."""
        with visiting(self.base.rotary_emb, self.device), self._taken_over():
            yield

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """Have a layer where the prompt is computed; layers come in order."""
        if self.stream_weights and self._slots is None:
            self._slots = Slots(self.layers, self.device)
        with nullcontext() if self._slots is None else self._slots.layer(index):
            yield

    def release(self) -> None:
        """Free what layers were brought to."""
        self._slots = None

    @contextmanager
    def _taken_over(self) -> Iterator[None]:
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(_NAME)
        kept = self.base.layers, self.base.rotary_emb
        self.base.rotary_emb = _Rotary(self.base.rotary_emb)
        try:
            yield
        finally:
            self.base.layers, self.base.rotary_emb = kept
            self.model.set_attn_implementation(before)

    def rope_table(self, span: Span) -> RopeTable:
        """Rotation of the span's positions, as the whole prompt has it."""
        rotary = _Rotary(self.rotary)
        rotary.total = span.total
        positions = torch.arange(span.start, span.stop, device=self.device)[None]
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        table: RopeTable = rotary(like, positions)
        return table

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """What the first layer's forward is given: (B, C) → (B, C, d)."""
        embedding = self.base.get_input_embeddings()
        embedded: torch.Tensor = embedding(input_ids.to(embedding.weight.device))
        return embedded.to(self.device)

    def step(self, step: Step, hidden: torch.Tensor) -> None:
        """One layer for one chunk: ``hidden`` (B, C, d) is overwritten with the layer's output."""
        hidden.copy_(self.output(step, hidden))

    def output(self, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        """One layer's output for one chunk (B, C, d), a new tensor."""
        final = self.final_norm
        setattr(self.base, self._norm, nn.Identity())
        try:
            with self._serving(step):
                output: torch.Tensor = self._forward(self.base, step.index, step.span, hidden)[0]
                return output
        finally:
            setattr(self.base, self._norm, final)

    def project(self, step: Step, hidden: torch.Tensor) -> None:
        """What later layers and tokens need of the last layer: here all of it, as :meth:`step`."""
        self.step(step, hidden)

    def last_row(self, step: Step, hidden: torch.Tensor) -> None:
        """The rest of the last layer for the last row (B, 1, d), in place: here nothing."""

    @contextmanager
    def _serving(self, step: Step) -> Iterator[None]:
        """Have an attention module that runs write to, read from and tell this step."""
        taken = _step.set(step)
        try:
            with nullcontext() if step.watch.input_rows == 0 else self._inputs_watched(step):
                yield
        finally:
            _step.reset(taken)

    @contextmanager
    def _inputs_watched(self, step: Step) -> Iterator[None]:
        def tell(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            step.watch.inputs(step.index, args[0] if args else kwargs["hidden_states"])

        attention = self.attention(step.index)
        handle = attention.register_forward_pre_hook(tell, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and head for the last row: (B, 1, d) → (B, V)."""
        head = self.model.get_output_embeddings()
        with visiting(self.final_norm, self.device), visiting(head, self.device):
            return self._logits(hidden)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._forward(self.model, None, Span(0, 1, 1), hidden).logits
        return logits[:, -1]

    def queries(self, step: Step, module: Any, normed: torch.Tensor, kwargs: Any) -> None:
        """Let the step's watch see the queries of an attention module that ran.

        Args:
            normed: the last rows of its input, (B, n, d).
            kwargs: what it was called with for all rows.
        """
        tail = slice(step.span.start, step.span.stop)
        cos, sin = (part[:, tail] for part in kwargs["position_embeddings"])
        given = {
            **{name: value for name, value in kwargs.items() if name not in _PER_ROW},
            "hidden_states": normed,
            "attention_mask": None,
            "position_embeddings": (cos, sin),
            compat.layer_cache_argument(module): StandIn(),
        }
        config = self.model.config
        before = config._attn_implementation
        config._attn_implementation = _NAME
        taken = _step.set(dataclasses.replace(step, backend=_NO_ATTENTION))
        try:
            module(**given)
        finally:
            _step.reset(taken)
            config._attn_implementation = before

    def _forward(self, module: Any, index: int | None, span: Span, hidden: torch.Tensor) -> Any:
        """The forward of ``module`` with one layer, or none and the final norm."""
        layers = [] if index is None else [self.layers[index]]
        self.base.layers = nn.ModuleList(layers)
        positions = torch.arange(span.start, span.stop, device=hidden.device)[None]
        self.base.rotary_emb.total = span.total
        options = {compat.cache_argument(self.model): StandIn(), "position_ids": positions}
        # The first layer gets what embeddings give, which some families scale within their forward.
        # What comes later must not be scaled, so it is put in behind that.
        taker = None if index == 0 else layers[0] if layers else self.final_norm
        with nullcontext() if taker is None else _given(taker, hidden):
            return module(inputs_embeds=hidden, use_cache=True, return_dict=True, **options)


@contextmanager
def _given(module: nn.Module, hidden: torch.Tensor) -> Iterator[None]:
    """Call ``module`` with these hidden states, whatever it is called with."""

    def replace(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (hidden, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden}

    handle = module.register_forward_pre_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


class _Rotary(nn.Module):
    """Rotary tables of a chunk as the whole prompt has them.

    The prompt's last position rides along: scaled variants (dynamic, longrope) choose their
    frequencies by the largest position of a call, which must be that of the whole prompt.
    """

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.plain = plain
        self.total = 1

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any) -> RopeTable:
        last = torch.full_like(position_ids[:, :1], self.total - 1)
        cos, sin = self.plain(x, torch.cat((position_ids, last), dim=1), *args)
        return cos[:, :-1], sin[:, :-1]


class StandIn(Cache):
    """In place of a cache: hands keys and values to the step that runs."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        store = _step.get().store
        store.write(key_states, value_states)
        return store.read()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


#: Our attention function among those of transformers. No mask function has this name, and so
#: transformers makes no mask: attention is causal by itself.
_NAME = "tidekv"
_step: ContextVar[Step] = ContextVar("tidekv_step")


def _attention(
    _: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    __: Any,
    scaling: float,
    **___: Any,
) -> tuple[torch.Tensor, None]:
    step = _step.get()
    step.watch.queries(step.index, query, step.store)
    return step.backend.attend(query, key, value, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _attention)

#: What an attention module is given row by row.
_PER_ROW = frozenset({"position_ids", "cache_position"})
#: For those who want the queries and nothing else.
_NO_ATTENTION = Backend("eager", "none", lambda queries, keys, values, scaling: queries)
