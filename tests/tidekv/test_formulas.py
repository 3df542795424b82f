"""Formulas of a prefill's peak, against models and against each other."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.tidekv.conftest import make_tiny
from tidekv.errors import LoadError
from tidekv.formulas import Case, peak
from tidekv.formulas.asked import DEFAULTS
from tidekv.loading import config_of
from tidekv.methods import CACHES
from tidekv.schedules import SCHEDULES
from tidekv.selectors import SELECTORS
from tidekv.shapes import FAMILIES, Shape, shape_of

GiB = 1 << 30


@pytest.fixture
def llama() -> Shape:
    found = shape_of(config_of("llama-3.1-8b"))
    assert found is not None
    return found


@pytest.fixture
def case(llama: Shape) -> Case:
    """The paper's setting at 64 K."""
    return Case(
        shape=llama,
        schedule="layer_major",
        selector="snapkv",
        kernel="flash",
        batch=1,
        prompt=65536,
        kept=(4096,) * 32,
        chunk=2048,
        piece=512,
        window=32,
        block=2048,
        pooled=7,
        sinks=4,
        fewest=0,
        row_chunk=1,
        mlp_rows=None,
        quantised=None,
        placed=frozenset(),
        workspace=8_519_680,
        processors=108,
    )


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_those_of_the_model(family: str, tied: bool) -> None:
    model = make_tiny(family, tie_word_embeddings=tied)
    shape = shape_of(model.config.to_dict(), "float32")
    assert shape is not None
    held = [*model.parameters(), *model.buffers()]
    assert sorted(shape.weights()) == sorted(one.nbytes for one in held)


def test_what_is_not_known_has_no_shape() -> None:
    assert shape_of({"model_type": "gpt_neox", "dtype": "float32"}) is None
    assert shape_of({"model_type": "llama"}) is None


FEW = {"model_type": "llama", "dtype": "float32", "num_attention_heads": 4}


def test_a_configuration_without_a_size_is_refused_by_name() -> None:
    with pytest.raises(LoadError, match="no num_hidden_layers"):
        shape_of({**FEW, "hidden_size": 64})
    with pytest.raises(LoadError, match="no hidden_size"):
        shape_of(FEW)


@pytest.mark.parametrize("size", [0, -64, "64", 64.0, True])
def test_a_configuration_with_what_is_no_size_is_refused(size: object) -> None:
    with pytest.raises(LoadError, match=f"has {size!r} for hidden_size, which is no size"):
        shape_of({**FEW, "hidden_size": size})


@pytest.mark.parametrize(
    ("what", "registry"), [("schedule", SCHEDULES), ("selector", SELECTORS), ("cache", CACHES)]
)
def test_defaults_are_those_of_the_classes(
    what: str, registry: Mapping[str, Callable[..., Any]]
) -> None:
    for name, values in DEFAULTS[what].items():
        if name == "none":
            continue
        made = registry[name]
        chosen = made.layer_class() if what == "cache" else made()  # type: ignore[attr-defined]
        assert {key: getattr(chosen, key) for key in values} == dict(values)


@pytest.mark.parametrize(
    ("schedule", "prompt", "published"),
    [("whole_prompt", 65536, 22.748), ("whole_prompt", 131072, 30.031)],
)
def test_snapkv_takes_what_was_published(
    case: Case, schedule: str, prompt: int, published: float
) -> None:
    found = peak(replace(case, schedule=schedule, prompt=prompt))
    assert found.total / GiB == pytest.approx(published, abs=0.0015)


def test_terms_of_layer_major(case: Case) -> None:
    found = peak(case)
    assert found.of("KV_res/full") == 2 * 8 * 65536 * 128 * 2
    assert found.of("KV_res/compact") == 30 * 2 * 8 * 4096 * 128 * 2
    assert found.of("KV_res") == found.of("KV_res/full") + found.of("KV_res/compact")
    assert found.of("Hidden") == 65536 * 4096 * 2
    assert found.total == sum(
        found.of(name) for name in ("model", "KV_res", "Hidden", "Act", "Temp", "backend", "other")
    )


def test_workspace_does_not_grow_with_the_prompt(case: Case) -> None:
    shorter, longer = peak(replace(case, prompt=16384)), peak(case)
    for name in ("Act", "Temp", "KV_res/compact"):
        assert shorter.of(name) == longer.of(name)


def test_a_batch_takes_its_multiple_of_all_but_the_model(case: Case) -> None:
    one, four = peak(case), peak(replace(case, batch=4))
    for name in ("KV_res", "Hidden", "Temp", "other"):
        assert four.of(name) == 4 * one.of(name)
    assert four.of("model") == one.of("model")


def test_small_chunks_leave_scoring_at_the_peak(case: Case) -> None:
    small = replace(case, kept=(1024,) * 32, chunk=128, piece=128)
    assert peak(small).where == "layer 30, scoring"
