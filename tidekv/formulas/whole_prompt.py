"""The model's own forward over the whole prompt.

See transformers' LlamaModel and tidekv.schedules.whole_prompt. Stock code holds all along the
embeddings, the layer's input, cosines, sines and positions of the prompt.
"""

from collections.abc import Iterator

from tidekv.formulas import layer
from tidekv.formulas.attention import flash, math, softmax
from tidekv.formulas.moments import (
    Case,
    Moment,
    Tensor,
    act,
    beside,
    choosing,
    full,
    resident,
    temp,
    tensor,
)
from tidekv.formulas.scoring import observing, sums
from tidekv.formulas.selecting import ends, finished, layer_end, observed, remembered


def moments(case: Case) -> Iterator[Moment]:
    """Those of the last layer, when all others are compact: none has more.

    transformers' eager attention gives its weights back, and the layer holds them to its end.
    """
    s, b, last = case.shape, case.shape.element, case.shape.layers - 1
    states = act("states of all rows, B·S·d·b", case.batch * case.prompt * s.hidden * b)
    always = (
        *resident(case),
        tensor("Hidden", "layer input and embeddings, B·S·d·b", states.bytes, min(s.layers, 2)),
        act("cos and sin, S·D·b", case.prompt * s.head * b, 2),
        tensor("backend", "positions, 8·S", 8 * case.prompt),
    )
    pairs = case.batch * case.prompt**2
    weights: tuple[Tensor, ...] = ()
    if case.kernel == "eager":
        always = (*always, tensor("backend", "mask, B·S²·b", pairs * b))
        weights = (act("weights of attention, B·Hq·S²·b", pairs * s.query_heads * b),)
    step, before = f"layer {last}, ", (*always, *finished(case, last), *remembered(case, last))
    yield from beside(before, _attention(case, states, weights), step)
    own = full(case, case.prompt)
    seen = (*observed(case), states, states, *weights)
    yield from beside((*before, *seen, own), _watched(case), step)
    for index in ends(case, last):
        held = (*always, *seen, *finished(case, index), *remembered(case, index))
        yield from beside(held, layer_end(case, index, case.prompt, own), f"layer {index}, ")
    after = (*always, *finished(case, s.layers), *remembered(case, s.layers), *weights, states)
    yield from beside(after, _mlp(case, states), step)


def _attention(case: Case, states: Tensor, weights: tuple[Tensor, ...]) -> Iterator[Moment]:
    """Norm, projections, rotation and the kernel."""
    yield from beside((states,), _rotation(case))
    size = case.batch * case.prompt * case.shape.attention * case.shape.element
    query = act("queries, B·S·Hq·D·b", size)
    seen = (states, query, full(case, case.prompt))
    attended = act("attention's output, B·S·Hq·D·b", query.bytes)
    yield from beside(seen, _kernel(case, attended, weights))
    yield Moment("output projection", (*seen, *weights, attended, states))


def _rotation(case: Case) -> Iterator[Moment]:
    """``apply_rotary_pos_emb`` has queries (and keys) in four versions: as they were, times
    cosines, turned, times sines."""
    s, b = case.shape, case.shape.element
    lines = case.batch * case.prompt
    query = act("queries in some version, B·S·Hq·D·b", lines * s.attention * b)
    key = act("keys or values in some version, B·S·Hkv·D·b", lines * s.kv_heads * s.head * b)
    if s.normalises_heads:
        norms = [layer.norm(case, case.prompt * s.query_heads, s.head, "norm of queries")]
        yield from beside((query,), norms)
        norms = [layer.norm(case, case.prompt * s.kv_heads, s.head, "norm of keys")]
        yield from beside((query, key), norms)
    yield Moment("rotation of queries", (*[query] * 4, *[key] * 2))
    yield Moment("rotation of keys", (*[query] * 2, *[key] * 5))


def _watched(case: Case) -> Iterator[Moment]:
    """H2O has the module make every query once more, which is its output too."""
    if case.selector != "h2o":
        return
    s, b = case.shape, case.shape.element
    yield from choosing(_rotation(case))
    query = temp("queries, B·S·Hq·D·b", case.batch * case.prompt * s.attention * b)
    held = (query, *sums(case))
    yield from beside(held, observing(case, case.prompt, case.prompt))
    output = temp("output, B·S·d·b", case.batch * case.prompt * s.hidden * b)
    yield Moment("choosing, output projection", (*held, query, output))


def _kernel(case: Case, attended: Tensor, weights: tuple[Tensor, ...]) -> Iterator[Moment]:
    """transformers asks for no log-sum-exp; FlashAttention gives one all the same.

    Its eager attention expands keys and values; of a single KV head that is a view.
    """
    if case.kernel == "flash":
        yield flash(case, case.prompt, case.prompt)
        return
    if case.kernel == "efficient":
        yield Moment("attention", (attended, act("seed and offset", 8, 2)))
        return
    if case.kernel == "math":
        mask = act("mask in fp32, 4·S²", 4 * case.prompt**2)
        yield from beside((mask,), math(case, case.prompt, case.prompt, case.shape.kv_heads))
        return
    expanded = act("expanded K and V, B·Hq·S·D·b", attended.bytes, 2)
    held = (expanded,) if case.shape.query_heads > case.shape.kv_heads > 1 else ()
    yield Moment("attention, scaled logits", (*held, *weights, *weights))
    number = case.batch * case.shape.query_heads * case.prompt**2
    yield from beside(held, softmax(case, number))
    yield Moment("attention, product with values", (*held, *weights, attended, attended))


def _mlp(case: Case, residual: Tensor) -> Iterator[Moment]:
    """With the residual: the norm; ``act(gate)·up``; the output.

    In pieces (MST) there is the whole output, and a piece of the rest.
    """
    s, b = case.shape, case.shape.element
    yield layer.norm(case, case.prompt, where="norm of the MLP")
    in_pieces = case.mlp_rows is not None
    piece = min(case.mlp_rows or case.prompt, case.prompt)
    held = (residual, *((residual,) if in_pieces else ()))
    wide = act("gate, up and product, B·S·d_ff·b", case.batch * piece * s.mlp * b, 3)
    yield Moment("the product in its MLP", (*held, wide))
    product = act("product, B·S·d_ff·b", wide.bytes)
    yield Moment(
        "the output of its MLP",
        (*held, product, act("output, B·S·d·b", case.batch * piece * s.hidden * b)),
    )
