"""Allocations that are found, sorted and grouped, held against a walk through all of them."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from memtrace.analysis.accounts import accounts
from memtrace.analysis.catalogue import Allocation, Catalogue, Order, Query
from memtrace.trace.reader import open_trace
from tests.synthetic import History, prefill, seeded_history


def of(history: History, folder: Path) -> Catalogue:
    (process,) = open_trace(history.write(folder / "run")).processes
    return Catalogue(accounts(process)[0])


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    return of(seeded_history(3, 400), tmp_path)


def everything(catalogue: Catalogue) -> list[Allocation]:
    return catalogue.read(catalogue.find(Query()))


@pytest.mark.parametrize(
    ("query", "holds"),
    [
        (Query(), lambda one: True),
        (Query(words="PREFILL, layer"), lambda one: one.place.phase == "prefill"),
        (Query(words="layer 7"), lambda one: one.place.layer == 7),
        (Query(words="no such place"), lambda one: False),
        (Query(components=("KV_res", "Act")), lambda one: one.component[:3] in ("KV_", "Act")),
        (Query(components=("KV_res/full",)), lambda one: one.component == "KV_res/full"),
        (Query(bytes=(3000, None)), lambda one: one.bytes >= 3000),
        (Query(bytes=(3000, 5000)), lambda one: 3000 <= one.bytes <= 5000),
        (Query(lifetime_us=(None, 40_000)), lambda one: one.lifetime_us <= 40_000),
        (Query(kept=True), lambda one: not one.freed),
        (
            Query("decode", ("Temp",), (1000, None), (2000, None), kept=True),
            lambda one: (
                one.place.phase == "decode"
                and one.component == "Temp"
                and one.bytes >= 1000
                and one.lifetime_us >= 2000
                and not one.freed
            ),
        ),
    ],
)
def test_what_is_found_is_what_holds(
    catalogue: Catalogue, query: Query, holds: Callable[[Allocation], bool]
) -> None:
    found = catalogue.read(catalogue.find(query))
    assert found == [one for one in everything(catalogue) if holds(one)]


@pytest.mark.parametrize(
    ("order", "key"),
    [
        (Order.SIZE, lambda one: one.bytes),
        (Order.LIFETIME, lambda one: one.lifetime_us),
        (Order.PRODUCT, lambda one: one.bytes * one.lifetime_us),
        (Order.LATEST, lambda one: one.event),
    ],
)
def test_pages_follow_each_other(
    catalogue: Catalogue, order: Order, key: Callable[[Allocation], int]
) -> None:
    rows = catalogue.find(Query())
    pages = [catalogue.page(rows, order, start, 7) for start in range(0, len(rows) + 7, 7)]
    shown = [one for page in pages for one in catalogue.read(page)]
    assert shown == sorted(everything(catalogue), key=key, reverse=True)


def test_hot_spots_are_sums_over_their_allocations(catalogue: Catalogue) -> None:
    rows = catalogue.find(Query(words="prefill"))
    products: dict[tuple[object, ...], float] = defaultdict(float)
    counts: dict[tuple[object, ...], int] = defaultdict(int)
    for one in catalogue.read(rows):
        key = (one.component, one.place.folded(), one.stack)
        products[key] += one.bytes * one.lifetime_us / 1e6
        counts[key] += 1
    found = catalogue.hot_spots(rows, 1000)
    assert {
        (spot.group.component, spot.group.place, spot.group.stack): spot.group.count
        for spot in found
    } == counts
    most = [spot.byte_seconds for spot in catalogue.hot_spots(rows, 3)]
    assert most == pytest.approx(sorted(products.values(), reverse=True)[:3])


def test_a_hot_spot_names_its_layers(tmp_path: Path) -> None:
    found = of(prefill(), tmp_path)
    [spot] = [
        one
        for one in found.hot_spots(found.find(Query()), 100)
        if one.group.component == "KV_res/compact"
    ]
    assert spot.group.where == "compress > layers 0-3 > aten.gather"
    assert (spot.group.count, spot.group.bytes) == (4, 4 * (128 << 10))


def test_one_that_was_not_freed_lives_until_the_end(tmp_path: Path) -> None:
    history = History()
    history.alloc(100, "Act")
    history.free(history.alloc(50, "Temp"))
    kept, freed = everything(of(history, tmp_path))
    assert (kept.freed, kept.lifetime_us, kept.born_us) == (False, 2000, 1000)
    assert (freed.freed, freed.lifetime_us) == (True, 1000)


def test_frames_of_a_stack_are_searched(tmp_path: Path) -> None:
    history = History()
    history.alloc(100, "Act")
    history.rows["stacks"].append((["model.py:12:forward"],))
    history.rows["contexts"][0] = (*history.rows["contexts"][0][:-1], 0)
    found = of(history, tmp_path)
    assert len(found.find(Query(words="model.py:12, empty"))) == 1
    assert everything(found)[0].stack == ("model.py:12:forward",)
