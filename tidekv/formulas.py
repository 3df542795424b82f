"""What a prefill holds at its peak, from the sizes of the model and the prompt alone.

A formula is a list of the tensors that are alive at a moment; a schedule has a few moments at which
it can peak, and its peak is the largest of them. So each term can be set beside a recorded one
tensor by tensor, and a difference is a tensor. Bytes are those of the CUDA caching allocator, which
hands out multiples of 512; nothing is fitted.

Known are ``whole_prompt`` and ``layer_major`` with the selector ``snapkv`` and a full-precision
cache, FlashAttention, and the families of :data:`tidekv.shapes.FAMILIES`.

Symbols: B prompts of S tokens, C rows of a chunk, p rows of a piece, K rows kept, W window rows,
b_s keys that scoring reads at a time, N layers, d hidden size, d_ff of the MLP, Hq query heads, Hkv
KV heads, D head size, V vocabulary, b bytes of a number.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tidekv.shapes import Shape

#: The caching allocator's smallest block, of which every block is a multiple.
_BLOCK = 512


@dataclass(frozen=True)
class Case:
    """One prefill: ``shape``, and what was chosen. Rows, but for ``workspace`` in bytes.

    Attributes:
        schedule: ``whole_prompt`` or ``layer_major``.
        batch: B.
        prompt: S.
        kept: K.
        chunk: C.
        piece: p.
        window: W.
        block: b_s.
        workspace: what PyTorch gives cuBLAS on the card.
    """

    shape: Shape
    schedule: str
    batch: int
    prompt: int
    kept: int
    chunk: int
    piece: int
    window: int
    block: int
    workspace: int


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


def peak(case: Case) -> Moment:
    """The largest moment; of equal ones the first in time."""
    moments = {"whole_prompt": _whole_prompt, "layer_major": _layer_major}[case.schedule](case)
    return max(moments, key=lambda moment: moment.total)


def _whole_prompt(case: Case) -> Iterator[Moment]:
    """The product ``act(gate)·up`` in the last layer's MLP, when all layers are compact.

    Stock code holds there, per row of the prompt: the MLP's input and the residual, 2·d·b; gate, up
    and their product, 3·d_ff·b; the layer's input and the embeddings, 2·d·b; cos and sin, 2·D·b,
    and its position, 8. For d_ff ≥ 2·d no other moment is as large: attention holds 2·Hkv·D·b of K
    and V and up to some 6·d·b instead of the 3·d_ff·b.
    """
    s, b = case.shape, case.shape.element
    rows = case.batch * case.prompt
    yield Moment(
        f"layer {s.layers - 1}, the product in its MLP",
        (
            *_always(case),
            _compact(case, s.layers),
            _tensor("Hidden", "layer input and embeddings, B·S·d·b", rows * s.hidden * b, 2),
            _tensor("Act", "MLP input and residual, B·S·d·b", rows * s.hidden * b, 2),
            _tensor("Act", "gate, up and product, B·S·d_ff·b", rows * s.mlp * b, 3),
            _tensor("Act", "cos and sin, S·D·b", case.prompt * s.head * b, 2),
            _tensor("backend", "positions, 8·S", 8 * case.prompt),
        ),
    )


def _layer_major(case: Case) -> Iterator[Moment]:
    """One layer's full K and V, 2·B·Hkv·S·D·b, the hidden states of all rows, B·S·d·b, and a step.

    Layers end one by one, so the largest step is that of layer N-2, beside N-1 compact caches, or
    one of layer N-1, beside N-1 of them: of it only keys and values are computed for every row.
    """
    s, b = case.shape, case.shape.element
    chunk = min(case.chunk, case.prompt)
    piece = min(case.piece, chunk)
    full = _tensor(
        "KV_res/full",
        "K and V of the layer that runs, B·Hkv·S·D·b",
        case.batch * s.kv_heads * case.prompt * s.head * b,
        2,
    )
    hidden = _tensor("Hidden", "hidden states, B·S·d·b", case.batch * case.prompt * s.hidden * b)
    last_row = _tensor("Hidden", "hidden state of the last row, B·d·b", case.batch * s.hidden * b)
    window = _tensor(
        "Temp",
        "queries of the window, B·Hq·W·D·b",
        case.batch * case.window * s.attention * b,
    )

    def moment(where: str, compact: int, states: Tensor, *tensors: Tensor) -> Moment:
        held = (*_always(case), full, window, states, _compact(case, compact))
        return Moment(where, (*held, *tensors))

    rope = _tensor("Act", "cos and sin, (C+1)·D·b", (chunk + 1) * s.head * b, 2)
    queries = _tensor("Act", "queries, B·C·Hq·D·b", case.batch * chunk * s.attention * b)
    before, last = s.layers - 2, s.layers - 1
    if before >= 0:
        step = f"layer {before}, "
        yield moment(f"{step}norm", before, hidden, queries, rope, *_norm(case, piece))
        rotated = case.batch * piece * s.attention * b
        yield moment(
            f"{step}rotation of queries",
            before,
            hidden,
            queries,
            rope,
            _tensor("Act", "normed, B·p·d·b", case.batch * piece * s.hidden * b),
            _tensor("Act", "queries of a piece in three versions, B·p·Hq·D·b", rotated, 3),
        )
        yield moment(
            f"{step}attention",
            before,
            hidden,
            queries,
            _tensor("Act", "attention's output, B·C·Hq·D·b", queries.bytes),
            _tensor("backend", "log-sum-exp, 4·B·Hq·C", 4 * case.batch * s.query_heads * chunk),
        )
        yield moment(
            f"{step}MLP",
            before,
            hidden,
            _tensor("Act", "normed, B·p·d·b", case.batch * piece * s.hidden * b),
            _tensor("Act", "gate and up, B·p·d_ff·b", case.batch * piece * s.mlp * b, 2),
        )
        yield moment(f"{step}scoring", before, hidden, *_scoring(case))
        yield moment(f"{step}compression", before + 1, hidden, _indices(case))
    step = f"layer {last}, "
    yield moment(f"{step}norm", last, hidden, rope, *_norm(case, piece))
    yield moment(f"{step}scoring", last, last_row, *_scoring(case))
    yield moment(f"{step}compression", last + 1, last_row, _indices(case))


def _always(case: Case) -> Iterator[Tensor]:
    """Weights, token ids and cuBLAS's workspace."""
    for size in case.shape.weights():
        yield _tensor("model", "weights", size)
    yield _tensor("other", "token ids, 8·B·S", 8 * case.batch * case.prompt)
    yield _tensor("backend", "workspace of cuBLAS", case.workspace)


def _compact(case: Case, layers: int) -> Tensor:
    s = case.shape
    size = case.batch * s.kv_heads * case.kept * s.head * s.element
    return _tensor("KV_res/compact", "kept K and V of a layer, B·Hkv·K·D·b", size, 2 * layers)


def _norm(case: Case, piece: int) -> tuple[Tensor, ...]:
    """An RMS norm of a piece: its fp32 copy and the product with 1/RMS, and two numbers a row.

    A prompt in fp32 needs no copy; the product and the one with the weights remain.
    """
    rows = case.batch * piece
    copies = _tensor("Act", "norm of a piece in fp32, 4·B·p·d", 4 * rows * case.shape.hidden, 2)
    return copies, _tensor("Act", "variance of each row, 4·B·p", 4 * rows, 2)


def _scoring(case: Case) -> tuple[Tensor, ...]:
    """The first pass over keys: O(B·Hq·(W·b_s + W²) + B·Hkv·(S + b_s·D)), all in fp32.

    The logits of the window's own keys stay until those of the first block are there.
    """
    s = case.shape
    heads, prefix = case.batch * s.query_heads, max(case.prompt - case.window, 0)
    block = min(case.block, prefix)
    found = [
        _tensor("Temp", "scores, 4·B·Hkv·(S-W)", 4 * case.batch * s.kv_heads * prefix),
        _tensor("Temp", "scaled queries, 4·B·Hq·W·D", 4 * heads * case.window * s.head),
        _tensor("Temp", "maximum and sum of each query, 4·B·Hq·W", 4 * heads * case.window, 2),
        _tensor("Temp", "the window's own logits, 4·B·Hq·W²", 4 * heads * case.window**2),
        _tensor("Temp", "logits of a block, 4·B·Hq·W·b_s", 4 * heads * case.window * block),
    ]
    if s.element < 4:
        size = 4 * case.batch * s.kv_heads * block * s.head
        found.append(_tensor("Temp", "keys of a block in fp32, 4·B·Hkv·b_s·D", size))
    return tuple(found)


def _indices(case: Case) -> Tensor:
    size = 8 * case.batch * case.shape.kv_heads * case.kept
    return _tensor("Temp", "positions of the kept rows, 8·B·Hkv·K", size)


def _tensor(component: str, what: str, size: int, count: int = 1) -> Tensor:
    return Tensor(component, what, -(-size // _BLOCK) * _BLOCK, count)


def sizes(tensors: Iterable[Tensor]) -> list[int]:
    """Bytes of each tensor, one by one."""
    return [one.bytes for one in tensors for _ in range(one.count)]
