"""Which changes make a prompt fit, and in what order they are tried."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tidekv.test_plan import LLAMA, ON_CARD, plan
from tidekv.plans.fitting import Changes, bus_bytes, ladder, propose
from tidekv.shapes import Shape

LLAMA_SHAPE = Shape("llama", 32, 4096, 14336, 32, 8, 128, 128_256, False, "bfloat16")
SIZES = {"chunk_size": 2048, "piece_rows": 512}
PLACED = ["park_caches", "host_embeddings", "stream_weights", "host_bridge"]

CARDS = """
[devices.small-8g]
name = "Small"
total = 8_589_934_592
capability = "8.6"
processors = 48
l2_cache = 4_194_304
context = 268_435_456

[devices.tiny]
name = "Tiny"
total = 536_870_912
capability = "8.6"
processors = 48
l2_cache = 4_194_304
"""


def test_rungs_go_from_launches_to_ever_more_bytes_over_the_bus() -> None:
    rungs = list(ladder(SIZES, PLACED))
    assert rungs[:3] == [{}, {"chunk_size": 512}, {"chunk_size": 512, "piece_rows": 128}]
    assert [list(rung) for rung in rungs[3:7]] == [PLACED[: n + 1] for n in range(4)]
    assert rungs[-1].keys() == SIZES.keys() | set(PLACED)


def test_what_is_small_or_on_the_host_already_is_no_rung() -> None:
    assert list(ladder({"chunk_size": 256, "piece_rows": 64}, [])) == [{}]


def test_bytes_over_the_bus_are_those_of_the_tensors() -> None:
    moved = bus_bytes(LLAMA_SHAPE, 1, 131_072, 4096)
    assert moved["park_caches"] == 512 << 20
    assert moved["host_embeddings"] == (1 << 30) + 128_256 * 4096 * 2
    layer = (2 * 4096 + 2 * 1024 + 3 * 14336) * 4096 + 2 * 4096
    assert moved["stream_weights"] == 32 * layer * 2
    assert moved["host_bridge"] == 64 << 30
    assert sorted(moved, key=moved.__getitem__) == PLACED


def proposed(
    needed: set[str], rungs: Iterator[Changes], expected: set[str] | None = None
) -> tuple[Changes | None, list[set[str]]]:
    """What is proposed where a prompt fits with all of ``needed``; what was tried, in order.

    Args:
        expected: what there is room with, as formulas have it; None: there are no formulas.
    """
    asked: list[set[str]] = []

    def fits(changes: Changes) -> bool:
        asked.append(set(changes))
        return needed <= changes.keys()

    def room(changes: Changes) -> bool | None:
        return None if expected is None else expected <= changes.keys()

    return propose(room, fits, list(rungs)), asked


@pytest.mark.parametrize(
    "needed", [set(), {"chunk_size"}, {"park_caches"}, {"host_embeddings"}, {"stream_weights"}]
)
def test_only_what_is_needed_is_proposed(needed: set[str]) -> None:
    found, asked = proposed(needed, ladder(SIZES, PLACED))
    assert found is not None
    assert set(found) == needed
    assert len(asked) <= 10
    assert all(asked.count(one) == 1 for one in asked)


@pytest.mark.parametrize("needed", [set(), {"piece_rows"}, {"park_caches", "stream_weights"}])
def test_one_try_is_enough_where_formulas_are_right(needed: set[str]) -> None:
    found, asked = proposed(needed, ladder(SIZES, PLACED), expected=needed)
    assert found is not None
    assert asked == [set(found)] == [needed]


def test_what_formulas_have_no_room_for_is_not_tried() -> None:
    assert proposed(set(), ladder(SIZES, PLACED), expected={"a smaller model"}) == (None, [])


def test_what_does_not_fit_in_pieces_is_proposed_anew() -> None:
    """The caches' room would do, and in the pieces that there are it takes the weights' too."""
    needed = {"park_caches", "stream_weights"}
    found, asked = proposed(needed, ladder(SIZES, PLACED), expected={"park_caches"})
    assert found is not None
    assert set(found) == needed
    assert asked[-1] == needed
    assert all(asked.count(one) == 1 for one in asked)
    assert all("park_caches" in one for one in asked)


def test_nothing_is_proposed_where_nothing_fits() -> None:
    found, asked = proposed({"a smaller model"}, ladder(SIZES, PLACED))
    assert found is None
    assert len(asked) == 8


@pytest.fixture
def small_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memtrace").mkdir()
    (tmp_path / "memtrace" / "devices.toml").write_text(CARDS)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def fitted(card: str) -> tuple[int, dict[str, Any]]:
    told = plan(*LLAMA, "--prompt", "2048", "--device", card, "--fit", "--json")
    assert "Traceback" not in told.stderr, told.stderr
    return told.returncode, json.loads(told.stdout)


@ON_CARD
@pytest.mark.slow
@pytest.mark.usefixtures("small_cards")
def test_weights_stream_to_a_card_that_is_too_small_for_them() -> None:
    status, found = fitted("small-8g")
    assert status == 0
    assert found["proposal"] == {"stream_weights": True}
    assert found["room"] == (8 << 30) - (256 << 20)
    tries = found["tries"]
    assert tries[0]["changes"] == {}
    assert tries[0]["by_formula"]
    (last,) = (one for one in tries if one["changes"] == found["proposal"])
    assert last["fits"]
    assert last["allocated_peak"] <= last["reserved_peak"] <= found["room"]
    weights = bus_bytes(LLAMA_SHAPE, 1, 2048, 1024)["stream_weights"]
    assert 0 <= last["to_device"] - weights < 1.2 * (1 << 30)  # embeddings, head


@ON_CARD
@pytest.mark.slow
@pytest.mark.usefixtures("small_cards")
def test_what_is_lacking_is_said_where_nothing_fits() -> None:
    status, found = fitted("tiny")
    assert status == 3
    assert found["proposal"] is None
    assert not any(one["fits"] for one in found["tries"])
    assert 0 < found["lacks"] < 1 << 30


@ON_CARD
@pytest.mark.parametrize("asked", [("--prompt", "65536"), ("--max-context",)])
def test_ctrl_c_ends_the_planned_process_too(asked: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "tidekv", "plan", *LLAMA, "--device", "a100-40g", *asked]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        said = process.stderr.readline()  # of the planned process
        assert "virtual GPU" in said
        os.killpg(process.pid, signal.SIGINT)
        out, rest = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "memtrace:" not in rest
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
