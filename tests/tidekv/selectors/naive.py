"""Every selector from its formula: dense, one number at a time, ties by sorting.

What is kept is a list per prompt of a list per KV head of ascending positions.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import torch

from tidekv.selectors import (
    CAKE,
    H2O,
    TOVA,
    AdaKV,
    ChunkKV,
    KeyDiff,
    Knorm,
    LayerEnd,
    PyramidKV,
    Recent,
    Selector,
    SnapKV,
    StreamingLLM,
)

Kept = list[list[list[int]]]
Numbers = Sequence[float]


def attention(layer: LayerEnd, batch: int, head: int) -> list[torch.Tensor]:
    """Each query's weights of the keys that it sees, by query head."""
    group = layer.queries.shape[1] // layer.keys.shape[1]
    keys, rows = layer.keys[batch, head // group], layer.keys.shape[2]
    weights = []
    for number, query in enumerate(layer.queries[batch, head]):
        seen = rows - layer.queries.shape[2] + number + 1
        logits = layer.scaling * (keys[:seen] * query).sum(-1)
        if layer.softcap is not None:
            logits = layer.softcap * torch.tanh(logits / layer.softcap)
        exps = torch.exp(logits - logits.max())
        weights.append(exps / exps.sum())
    return weights


def group_of(layer: LayerEnd, kv_head: int) -> range:
    """The query heads of a KV head."""
    size = layer.queries.shape[1] // layer.keys.shape[1]
    return range(kv_head * size, (kv_head + 1) * size)


def sums(layer: LayerEnd, batch: int, head: int, count: int) -> list[float]:
    """What the first ``count`` keys get from all queries together."""
    total = torch.zeros(layer.keys.shape[2], dtype=layer.keys.dtype)
    for weights in attention(layer, batch, head):
        total[: len(weights)] += weights
    return total[:count].tolist()


def mean(lists: Sequence[Numbers]) -> list[float]:
    return [sum(values) / len(lists) for values in zip(*lists, strict=True)]


def largest(lists: Sequence[Numbers]) -> list[float]:
    return [max(values) for values in zip(*lists, strict=True)]


#: What becomes of the query heads of a KV head.
AGGREGATE = {"mean": mean, "max": largest}


def pool(raw: Numbers, kernel: int, how: str) -> list[float]:
    pooled = []
    for i in range(len(raw)):
        near = raw[max(i - kernel // 2, 0) : i + kernel // 2 + 1]
        pooled.append(max(near) if how == "max" else sum(near) / kernel)
    return pooled


def ranked(scores: Numbers, candidates: Sequence[int]) -> list[int]:
    """Best first."""
    return sorted(candidates, key=lambda i: (-scores[i], i))


def every_head(layer: LayerEnd, choose: Callable[[int, int], Sequence[int]]) -> Kept:
    batch, heads = layer.keys.shape[:2]
    return [[sorted(choose(b, h)) for h in range(heads)] for b in range(batch)]


def snapkv_scores(snap: SnapKV, layer: LayerEnd, batch: int, kv_head: int) -> list[float]:
    prefix = layer.keys.shape[2] - snap.window
    aggregate = AGGREGATE[snap.aggregate]
    heads = [sums(layer, batch, head, prefix) for head in group_of(layer, kv_head)]
    if snap.aggregate_first:
        return pool(aggregate(heads), snap.kernel_size, snap.pooling)
    return aggregate([pool(head, snap.kernel_size, snap.pooling) for head in heads])


def snapkv(snap: SnapKV, layer: LayerEnd, rows: int) -> Kept:
    length = layer.keys.shape[2]

    def choose(batch: int, head: int) -> list[int]:
        scores = snapkv_scores(snap, layer, batch, head)
        free = ranked(scores, range(snap.sinks, length - snap.window))
        count = rows - snap.sinks - snap.window
        return [*range(snap.sinks), *free[:count], *range(length - snap.window, length)]

    return every_head(layer, choose)


def adakv(ada: AdaKV, layer: LayerEnd, rows: int) -> Kept:
    length, heads = layer.keys.shape[2], range(layer.keys.shape[1])
    free = rows - ada.sinks - ada.window
    candidates = range(ada.sinks, length - ada.window)
    kept: Kept = []
    for batch in range(layer.keys.shape[0]):
        scores = [snapkv_scores(ada, layer, batch, head) for head in heads]
        rivals = sorted((-scores[h][i], h, i) for h in heads for i in candidates)
        winners = [head for _, head, _ in rivals[: free * len(heads)]]
        exact = [winners.count(h) * (1 - ada.safeguard) + ada.safeguard * free for h in heads]
        budgets = [math.floor(value) for value in exact]
        by_remainder = sorted(heads, key=lambda h: (budgets[h] - exact[h], h))
        for head in by_remainder[: free * len(heads) - sum(budgets)]:
            budgets[head] += 1
        always = [*range(ada.sinks), *range(length - ada.window, length)]
        kept.append([sorted(always + ranked(scores[h], candidates)[: budgets[h]]) for h in heads])
    return kept


def chunkkv(chunks: ChunkKV, layer: LayerEnd, rows: int) -> Kept:
    length = layer.keys.shape[2]
    prefix, aggregate = length - chunks.window, AGGREGATE[chunks.aggregate]
    parts = [
        list(range(start, min(start + chunks.chunk, prefix)))
        for start in range(0, prefix, chunks.chunk)
    ]

    def by_chunk(rows: Numbers) -> list[float]:
        return [sum(rows[i] for i in part) for part in parts]

    def of_head(batch: int, kv_head: int) -> list[float]:
        heads = [sums(layer, batch, head, prefix) for head in group_of(layer, kv_head)]
        if chunks.aggregate_first:
            return by_chunk(aggregate(heads))
        return aggregate([by_chunk(head) for head in heads])

    def choose(batch: int, kv_head: int) -> list[int]:
        heads = range(layer.keys.shape[1]) if chunks.shared else [kv_head]
        by_head = [of_head(batch, head) for head in heads]
        scores = [sum(values) for values in zip(*by_head, strict=True)]
        ordered = itertools.chain(*(parts[p] for p in ranked(scores, range(len(parts)))))
        return [*list(ordered)[: rows - chunks.window], *range(prefix, length)]

    return every_head(layer, choose)


def cake_measure(cake: CAKE, layer: LayerEnd) -> tuple[list[list[list[float]]], float]:
    """Scores by prompt and KV head, and the layer's preference."""
    prefix = layer.keys.shape[2] - cake.window
    entropy = variance = 0.0
    scores: list[list[list[float]]] = []
    for batch in range(layer.keys.shape[0]):
        scores.append([])
        for kv_head in range(layer.keys.shape[1]):
            indicators = []
            for head in group_of(layer, kv_head):
                raw = []
                weights = attention(layer, batch, head)
                for i in range(prefix):
                    column = [row[i].item() for row in weights]
                    middle = sum(column) / len(column)
                    shift = sum((a - middle) ** 2 for a in column) / (len(column) - 1)
                    entropy -= sum(a * math.log(a) for a in column if a > 0)
                    variance += shift
                    raw.append(middle + cake.gamma * shift)
                indicators.append(raw)
            aggregate = AGGREGATE[cake.aggregate]
            if cake.aggregate_first:
                scores[batch].append(pool(aggregate(indicators), cake.kernel_size, "avg"))
            else:
                by_head = [pool(raw, cake.kernel_size, "avg") for raw in indicators]
                scores[batch].append(aggregate(by_head))
    return scores, entropy ** (1 / cake.tau1) * variance ** (1 / cake.tau2)


def cake(selector: CAKE, layer: LayerEnd, rows: int) -> Kept:
    length = layer.keys.shape[2]
    prefix, count = length - selector.window, rows - selector.window
    scores, _ = cake_measure(selector, layer)

    def choose(batch: int, head: int) -> list[int]:
        return [*ranked(scores[batch][head], range(prefix))[:count], *range(prefix, length)]

    return every_head(layer, choose)


def h2o(heavy: H2O, layer: LayerEnd, rows: int) -> Kept:
    """Of a layer with all its queries."""
    length = layer.keys.shape[2]
    recent = int(round(rows * heavy.recent_share, 6))

    def choose(batch: int, kv_head: int) -> list[int]:
        heads = [sums(layer, batch, head, length) for head in group_of(layer, kv_head)]
        scores = AGGREGATE[heavy.aggregate](heads)
        hitters = ranked(scores, range(length - recent))[: rows - recent]
        return [*hitters, *range(length - recent, length)]

    return every_head(layer, choose)


def tova(selector: TOVA, layer: LayerEnd, rows: int) -> Kept:
    last, aggregate = layer.keys.shape[2] - 1, AGGREGATE[selector.aggregate]

    def of_head(batch: int, kv_head: int) -> list[float]:
        heads = group_of(layer, kv_head)
        return aggregate([attention(layer, batch, head)[-1].tolist() for head in heads])

    def choose(batch: int, kv_head: int) -> list[int]:
        heads = [kv_head] if selector.per_head else range(layer.keys.shape[1])
        scores = mean([of_head(batch, head) for head in heads])
        return [*ranked(scores, range(last))[: rows - 1], last]

    return every_head(layer, choose)


def keydiff(selector: KeyDiff, layer: LayerEnd, rows: int) -> Kept:
    length = layer.keys.shape[2]
    free = range(length - selector.recent)

    def choose(batch: int, head: int) -> list[int]:
        keys = [key.tolist() for key in layer.keys[batch, head]]
        units = [[x / math.hypot(*key) for x in key] for key in keys]
        anchor = mean(units)
        unlike = [
            -sum(x * a for x, a in zip(unit, anchor, strict=True)) / math.hypot(*anchor)
            for unit in units
        ]
        return [*ranked(unlike, free)[: rows - selector.recent], *range(free.stop, length)]

    return every_head(layer, choose)


def knorm(_: Knorm, layer: LayerEnd, rows: int) -> Kept:
    def choose(batch: int, head: int) -> list[int]:
        short = [-math.hypot(*key.tolist()) for key in layer.keys[batch, head]]
        return ranked(short, range(len(short)))[:rows]

    return every_head(layer, choose)


def streamingllm(selector: StreamingLLM, layer: LayerEnd, rows: int) -> Kept:
    length = layer.keys.shape[2]
    first = length - (rows - selector.sinks)
    return every_head(layer, lambda *_: [*range(selector.sinks), *range(first, length)])


def recent(_: Recent, layer: LayerEnd, rows: int) -> Kept:
    length = layer.keys.shape[2]
    return every_head(layer, lambda *_: range(length - rows, length))


NAIVE: dict[type[Selector], Callable[..., Kept]] = {
    SnapKV: snapkv,
    PyramidKV: snapkv,
    AdaKV: adakv,
    ChunkKV: chunkkv,
    CAKE: cake,
    H2O: h2o,
    TOVA: tova,
    KeyDiff: keydiff,
    Knorm: knorm,
    StreamingLLM: streamingllm,
    Recent: recent,
}
