"""Tensors that are alive at a moment, and what one prefill is to a formula.

Symbols: B prompts of S tokens, C rows of a chunk, p rows of a piece, P rows up to a chunk's end, K
rows kept, W window rows, b_s keys that scoring reads at a time, N layers, d hidden size, d_ff of
the MLP, Hq query heads, Hkv KV heads, D head size, V vocabulary, b bytes of a number.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tidekv.shapes import Shape

#: The caching allocator's smallest block, of which every block is a multiple.
_BLOCK = 512


@dataclass(frozen=True)
class Tensor:
    """``count`` tensors of one size.

    Attributes:
        component: what they belong to, such as ``KV_res/full``.
        what: what they are, with their size in symbols.
        bytes: of each, as the allocator counts it.
    """

    component: str
    what: str
    bytes: int
    count: int = 1

    @property
    def total(self) -> int:
        return self.bytes * self.count


def tensor(component: str, what: str, size: int, count: int = 1) -> Tensor:
    """``count`` tensors of ``size`` bytes, each in blocks of the allocator."""
    return Tensor(component, what, -(-size // _BLOCK) * _BLOCK, count)


def act(what: str, size: int, count: int = 1) -> Tensor:
    """Activations."""
    return tensor("Act", what, size, count)


def temp(what: str, size: int, count: int = 1) -> Tensor:
    """What selecting takes."""
    return tensor("Temp", what, size, count)


@dataclass(frozen=True)
class Moment:
    """What is alive at once."""

    where: str
    tensors: tuple[Tensor, ...]

    @property
    def total(self) -> int:
        """Allocated bytes."""
        return sum(one.total for one in self.tensors)

    def of(self, component: str) -> int:
        """Bytes of a component, all of its parts, or of one part such as ``KV_res/full``."""
        return sum(
            one.total
            for one in self.tensors
            if component in (one.component, one.component.partition("/")[0])
        )


#: A few moments, in the order of time.
Moments = Iterable[Moment]


def beside(held: Iterable[Tensor], moments: Moments, step: str = "") -> Iterator[Moment]:
    """Moments during which other tensors are held, in a named step."""
    before = tuple(held)
    for one in moments:
        yield Moment(f"{step}{one.where}", (*before, *one.tensors))


def choosing(moments: Moments) -> Iterator[Moment]:
    """Moments of a selector, whatever activations are alive then being its own."""
    for one in moments:
        own = (
            replace(part, component="Temp") if part.component == "Act" else part
            for part in one.tensors
        )
        yield Moment(f"choosing, {one.where}", tuple(own))


def sizes(tensors: Iterable[Tensor]) -> list[int]:
    """Bytes of each tensor, one by one; of none that is empty, which has no block."""
    return [one.bytes for one in tensors for _ in range(one.count) if one.bytes]


@dataclass(frozen=True)
class Quantised:
    """A ``kivi`` cache: bits of a code, numbers of a group, rows in full."""

    bits: int = 2
    group: int = 32
    residual: int = 128


@dataclass(frozen=True)
class Case:
    """One prefill: ``shape``, and what was chosen. Rows, but for ``workspace`` in bytes.

    Attributes:
        schedule: by name.
        selector: by name; None: every row is kept.
        kernel: of attention, see :mod:`tidekv.formulas.attention`.
        batch: B.
        prompt: S.
        kept: K of each layer, in order; their mean where layers share rows.
        chunk: C.
        piece: p.
        window: W.
        block: b_s.
        pooled: neighbouring keys whose scores are pooled.
        sinks: rows at the start that are kept whatever their score.
        fewest: rows that every head keeps at least, where heads keep unequal numbers.
        row_chunk: neighbouring rows that ChunkKV keeps together.
        mlp_rows: rows of an MLP's piece in the model's own forward; None: all at once.
        quantised: how kept rows are held; None: in full.
        placed: names of the options that have parts of a prefill elsewhere.
        workspace: what PyTorch gives cuBLAS on the card.
        processors: streaming multiprocessors of the card.
    """

    shape: Shape
    schedule: str
    selector: str | None
    kernel: str
    batch: int
    prompt: int
    kept: Sequence[int]
    chunk: int
    piece: int
    window: int
    block: int
    pooled: int
    sinks: int
    fewest: int
    row_chunk: int
    mlp_rows: int | None
    quantised: Quantised | None
    placed: frozenset[str]
    workspace: int
    processors: int

    @property
    def by_head(self) -> bool:
        """Whether attention runs one KV head after the other."""
        return self.schedule == "head_offload"

    @property
    def ragged(self) -> bool:
        """Whether heads keep unequal numbers of rows."""
        return self.selector == "adakv"

    @property
    def sharing(self) -> bool:
        """Whether layers share rows, and finished ones give some back to those that follow."""
        return self.selector == "cake"

    def after(self, layers: int) -> list[int]:
        """Rows of each of the first ``layers`` once they have ended.

        CAKE's share N·(K - W) beside their windows, as many as each layer needs, up to all rows of
        the prompt: here equally many, the first ones one more.
        """
        if not self.sharing or not layers:
            return list(self.kept[:layers])
        most = self.prompt - self.window
        total = self.shape.layers * (self.kept[0] - self.window)
        each, more = divmod(min(total, layers * most), layers)
        return [self.window + each + (number < more) for number in range(layers)]

    def spans(self) -> list[tuple[int, int]]:
        """Rows of each chunk, and rows up to its end."""
        ends = [*range(self.chunk, self.prompt, self.chunk), self.prompt]
        return [(end - start, end) for start, end in zip([0, *ends], ends, strict=False)]


def resident(case: Case) -> Iterator[Tensor]:
    """Weights, token ids and cuBLAS's workspace: there all along.

    Weights on the host visit: streamed ones in two slots of a layer each, the rotary embedding's
    buffers as long as layers run.
    """
    s = case.shape
    if "stream_weights" in case.placed:
        weights = [*s.layer() * min(s.layers, 2), *s.rotary()]
    elif "host_embeddings" in case.placed:
        weights = [*s.layer() * s.layers, *s.rotary()]
    else:
        weights = s.weights()
    yield from _weights(weights)
    yield from _inputs(case)


def at_head(case: Case) -> Iterator[Tensor]:
    """Where embeddings and head are on the host: what is there when the head visits."""
    s, placed = case.shape, case.placed
    layers = 0 if "stream_weights" in placed else s.layers
    yield from _weights([*s.layer() * layers, *s.ends()[:2], *s.rotary()])
    yield from _inputs(case)


def _weights(sizes_: list[int]) -> Iterator[Tensor]:
    for size, count in Counter(sizes_).items():
        yield tensor("model", "weights", size, count)


def _inputs(case: Case) -> Iterator[Tensor]:
    if not case.placed & {"stream_weights", "host_embeddings"}:  # they are beside the embeddings
        yield tensor("backend/ids", "token ids, 8·B·S", 8 * case.batch * case.prompt)
    yield tensor("backend", "workspace of cuBLAS", case.workspace)


def full(case: Case, rows: int, layers: int = 1) -> Tensor:
    """Keys and values of layers that are not finished."""
    s = case.shape
    size = case.batch * s.kv_heads * rows * s.head * s.element
    return tensor("KV_res/full", "K and V of a layer, B·Hkv·S·D·b", size, 2 * layers)
