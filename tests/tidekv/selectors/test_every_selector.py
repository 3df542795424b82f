"""What holds for every selector: its formula, its sizes, its requests."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tidekv.selectors.cases import PARAMETERS, as_lists, problems, random_layer
from tests.tidekv.selectors.naive import NAIVE
from tidekv import options
from tidekv.errors import InfeasibleError
from tidekv.selectors import (
    CAKE,
    H2O,
    SELECTORS,
    AdaKV,
    ChunkKV,
    LayerEnd,
    Random,
    Request,
    Selection,
    Selector,
    SnapKV,
    make,
)

KINDS = list(PARAMETERS)
names = [kind.__name__ for kind in KINDS]


def request_of(layer: LayerEnd, rows: int, scoring: str = "blockwise", layers: int = 1) -> Request:
    return Request(layers, layer.keys.shape[2], rows, scoring)


def choose(selector: Selector, layer: LayerEnd, request: Request) -> Selection:
    """One layer of a request, as a schedule has it."""
    choice = selector.begin(request)
    if selector.every_query:
        choice.observe(
            layer.index, layer.queries, layer.keys, scaling=layer.scaling, softcap=layer.softcap
        )
    return choice.select(layer)


def test_every_selector_is_tested():
    assert set(SELECTORS.values()) == set(KINDS)


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind is not Random], ids=lambda k: k.__name__
)
@settings(max_examples=150)
@given(data=st.data())
def test_selects_what_the_formula_selects(kind, data):
    """Ties included, in both ways of scoring."""
    selector, layer, rows = data.draw(problems(kind))
    expected = NAIVE[kind](selector, layer, rows)
    for scoring in ("blockwise", "dense"):
        selection = choose(selector, layer, request_of(layer, rows, scoring))
        assert as_lists(selection, layer.keys.shape[1]) == expected


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind is not AdaKV], ids=lambda k: k.__name__
)
@settings(max_examples=25)
@given(data=st.data())
def test_select_needs_no_choice(kind, data):
    """What a selector keeps of one layer alone is what its choice keeps of the first."""
    selector, layer, rows = data.draw(problems(kind))
    chosen = choose(selector, layer, request_of(layer, rows)).indices
    assert torch.equal(selector.select(layer, rows, "blockwise"), chosen)


@pytest.mark.parametrize("kind", KINDS, ids=names)
@settings(max_examples=40)
@given(data=st.data())
def test_sizes_order_and_mandatory_rows(kind, data):
    selector, layer, rows = data.draw(problems(kind))
    batch, heads, length = layer.keys.shape[:3]
    selection = choose(selector, layer, request_of(layer, rows))
    assert selection.indices.dtype == torch.int64
    sinks = range(getattr(selector, "sinks", 0))
    end = range(length - (selector.mandatory - len(sinks)), length)
    for prompt in as_lists(selection, heads):
        assert sum(map(len, prompt)) == heads * rows
        for kept in prompt:
            assert kept == sorted(set(kept))
            assert set(kept) >= {*sinks, *end}
            assert min(kept) >= 0 and max(kept) < length
    if not selector.head_budgets:
        assert selection.indices.shape == (batch, heads, rows)


@pytest.mark.parametrize("kind", KINDS, ids=names)
def test_keeps_all_of_a_layer_that_has_no_more(kind):
    """As in the first chunks of a prompt that is cut while it is read."""
    selector = kind()
    layer = random_layer(40, 40 if selector.every_query else selector.window, seed=1)
    for rows in (40, 200):
        kept = choose(selector, layer, Request(1, 400, rows))
        assert as_lists(kept, 2) == [[list(range(40))] * 2]


@pytest.mark.parametrize("kind", KINDS, ids=names)
def test_a_second_request_is_like_the_first(kind):
    selector = kind()
    queries = 60 if selector.every_query else selector.window
    first, other = (random_layer(60, queries, seed=seed) for seed in (1, 2))
    before = choose(selector, first, request_of(first, 45))
    choose(selector, other, request_of(other, 45))
    again = choose(selector, first, request_of(first, 45))
    assert torch.equal(before.indices, again.indices)


@pytest.mark.parametrize("kind", KINDS, ids=names)
def test_reads_no_value_of_the_device(kind):
    """Tensors without values can be selected from, but for a budget that depends on them."""
    selector = kind()
    queries = 80 if selector.every_query else selector.window
    layer = LayerEnd(
        0,
        torch.empty(2, 4, queries, 8, device="meta", dtype=torch.bfloat16),
        torch.empty(2, 2, 80, 8, device="meta", dtype=torch.bfloat16),
        torch.empty(2, 2, 80, 8, device="meta", dtype=torch.bfloat16),
        0.3,
    )
    if kind is CAKE:
        assert selector.select(layer, 60, "blockwise").shape == (2, 2, 60)
    else:
        selection = choose(selector, layer, request_of(layer, 60))
        assert selection.indices.numel() == 2 * 2 * 60
        assert (selection.counts is not None) == (kind is AdaKV)


@pytest.mark.parametrize("kind", KINDS, ids=names)
def test_half_precision_input_is_scored_in_fp32(kind):
    selector = kind()
    torch.manual_seed(0)
    count = 120 if selector.every_query else selector.window
    queries, keys = torch.randn(1, 4, count, 16).bfloat16(), torch.randn(1, 2, 120, 16).bfloat16()
    half = LayerEnd(0, queries, keys, keys, 0.25)
    same_values = LayerEnd(0, queries.float(), keys.float(), keys.float(), 0.25)
    for scoring in ("blockwise", "dense"):
        kept = [
            choose(selector, layer, request_of(layer, 64, scoring)) for layer in (half, same_values)
        ]
        assert torch.equal(kept[0].indices, kept[1].indices)


@pytest.mark.parametrize("kind", [SnapKV, AdaKV, ChunkKV], ids=lambda k: k.__name__)
def test_keeps_its_window_where_a_chunk_has_fewer_queries(kind):
    layer = random_layer(60, 7, seed=3)
    for prompt in as_lists(choose(kind(), layer, Request(1, 400, 45)), 2):
        for kept in prompt:
            assert set(kept) >= set(range(60 - 32, 60))
        assert sum(map(len, prompt)) == 2 * 45


@pytest.mark.parametrize("kind", KINDS, ids=names)
def test_budgets_that_cant_be(kind):
    selector = kind()
    if selector.mandatory:
        least = selector.mandatory
        with pytest.raises(InfeasibleError, match=f"use a budget of at least {least}"):
            selector.check(Request(1, 400, least - 1))
        with pytest.raises(InfeasibleError, match=f"{kind.__name__} always keeps {least} rows"):
            selector.check(Request(1, least - 1, least - 1))
    selector.check(Request(1, 400, max(selector.mandatory, 1)))


@pytest.mark.parametrize(
    ("kind", "parameters", "message"),
    [
        (SnapKV, {"window": 0}, "SnapKV needs window ≥ 1"),
        (SnapKV, {"window": "8"}, "window of SnapKV is a whole number, not '8'"),
        (SnapKV, {"window": True}, "window of SnapKV is a whole number, not True"),
        (SnapKV, {"aggregate_first": "no"}, "aggregate_first of SnapKV is true or false, not 'no'"),
        (CAKE, {"gamma": None}, "gamma of CAKE is a number, not None"),
        *(
            (kind, {name: "8"}, f"{name} of {kind.__name__} is .*, not '8'")
            for kind in KINDS
            for name, value in options.defaults(kind).items()
            if isinstance(value, int | float)
        ),
        (SnapKV, {"sinks": -1}, "sinks ≥ 0"),
        (SnapKV, {"block_size": 0}, "block_size ≥ 1"),
        (SnapKV, {"kernel_size": 4}, "odd and positive"),
        (SnapKV, {"pooling": "sum"}, "There is no pooling 'sum'; use one of max, avg."),
        (SnapKV, {"aggregate": "min"}, "There is no aggregate 'min'; use one of mean, max."),
        (SELECTORS["pyramidkv"], {"beta": 0.5}, "beta ≥ 1"),
        (SELECTORS["pyramidkv"], {"window": 0}, "PyramidKV needs window ≥ 1"),
        (AdaKV, {"safeguard": 1.5}, "safeguard in 0..1"),
        (ChunkKV, {"chunk": 0}, "chunk=0"),
        (ChunkKV, {"reuse": 0}, "reuse=0"),
        *(
            (kind, {"aggregate": "min"}, "There is no aggregate 'min'; use one of mean, max.")
            for kind in (ChunkKV, CAKE, H2O, SELECTORS["tova"])
        ),
        (CAKE, {"window": 1}, "window ≥ 2"),
        (CAKE, {"gamma": -1}, "gamma ≥ 0"),
        (CAKE, {"tau2": 0}, "tau2 > 0"),
        (CAKE, {"kernel_size": 2}, "odd and positive"),
        (H2O, {"recent_share": -0.1}, "recent_share in 0..1"),
        (SELECTORS["tova"], {"block_size": 0}, "block_size ≥ 1"),
        (SELECTORS["keydiff"], {"recent": -1}, "recent ≥ 0"),
        (SELECTORS["streamingllm"], {"sinks": -1}, "sinks ≥ 0"),
        (Random, {"seed": -1}, "seed in 0"),
    ],
)
def test_parameters_that_cant_be(kind, parameters, message):
    with pytest.raises(InfeasibleError, match=message):
        kind(**parameters)


def test_make():
    assert make("knorm") == SELECTORS["knorm"]()
    assert make(SnapKV(window=3)) == SnapKV(window=3)
    assert make(None) is None
    with pytest.raises(InfeasibleError, match="There is no selector 'best'; use one of snapkv, "):
        make("best")


@pytest.mark.parametrize(
    "kind",
    [kind for kind in KINDS if kind().window or kind.every_query],
    ids=lambda kind: kind.__name__,
)
def test_attention_based_selectors_say_how_a_group_becomes_one_head(kind):
    """Mean or maximum; and, where scores are pooled, before or after that."""
    fields = options.defaults(kind)
    assert fields["aggregate"] == "mean"
    assert fields.get("aggregate_first", True) is True
    assert ("aggregate_first" in fields) == bool({"kernel_size", "chunk"} & fields.keys())
    layer = random_layer(90, 90 if kind.every_query else kind().window, seed=7, group=4)
    # A maximum of maxima is the same in either order, and few long chunks leave little to choose.
    given = {name: value for name, value in (("pooling", "avg"), ("chunk", 3)) if name in fields}
    ways = [given, {**given, "aggregate": "max"}]
    if "aggregate_first" in fields:
        ways.append({**ways[1], "aggregate_first": False})
    kept = [str(as_lists(choose(kind(**way), layer, request_of(layer, 60)), 2)) for way in ways]
    assert len(set(kept)) == len(ways)


@pytest.mark.parametrize("kind", KINDS, ids=names)
def test_has_a_summary_of_one_line(kind):
    """Which the command line prints."""
    summary, rest = f"{kind.__doc__}\n\n".split("\n", 1)
    assert summary.endswith(".") and rest.startswith("\n")
