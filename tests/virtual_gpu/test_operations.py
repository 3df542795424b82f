"""What PyTorch's CUDA build does on a virtual GPU."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.virtual_gpu.running import results
from tests.virtual_gpu.vectors import TORCH

BACKENDS = {
    "native": "",
    "expandable": "expandable_segments:True",
    "async": "backend:cudaMallocAsync",
}
_ran: dict[str, Mapping[str, Any]] = {}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, cache: Path) -> str:
    return str(request.param)


@pytest.fixture
def ran(backend: str) -> Mapping[str, Any]:
    """Everything that the script does, with one of PyTorch's allocators."""
    if backend not in _ran:
        conf = BACKENDS[backend]
        _ran[backend] = results("rtx-4090-24g,h100-80g", "operations.py", PYTORCH_ALLOC_CONF=conf)
    return _ran[backend]


def test_the_budget_is_what_pytorch_reserves(ran: Mapping[str, Any]) -> None:
    assert ran["free_memory"] is True
    assert ran["used"] is True


def test_cublas_gets_its_workspace(ran: Mapping[str, Any]) -> None:
    kept = TORCH < (2, 15)  # from then on it is given back after the product
    assert ran["first_product"] == (8_519_680 if kept else 0)


@pytest.mark.parametrize("kernel", ["flash", "efficient", "math"])
def test_every_attention_kernel_goes_forward_and_back(ran: Mapping[str, Any], kernel: str) -> None:
    assert ran[kernel] == [1, 8, 128, 64] * 2


@pytest.mark.parametrize(
    ("operation", "expected"),
    {
        "masked": [1, 8, 128, 64],
        "topk": [4, 50],
        "sort": [1_000_000],
        "cumsum": [4, 32_000],
        "multinomial": [4, 7],
        "generator": [10],
        "convolution": [1, 8, 30, 30],
        "autocast": "torch.float16",
        "training_step": True,
        "moved_model": 0,
        "pinned": [True, True, True],
        "polled": True,
    }.items(),
)
def test_operations(ran: Mapping[str, Any], operation: str, expected: object) -> None:
    assert ran[operation] == expected


def test_an_event_is_done_once_the_device_was_waited_for(ran: Mapping[str, Any]) -> None:
    assert ran["side_stream"] == [False, True, True]


def test_a_block_that_a_stream_uses_waits_for_it(ran: Mapping[str, Any], backend: str) -> None:
    if backend == "async":
        pytest.skip("the driver's pool is not modelled: what is freed can be had at once")
    assert ran["freed_across_streams"] == [False, True]


def test_a_captured_graph_has_its_own_pool(ran: Mapping[str, Any], backend: str) -> None:
    if backend == "async":
        pytest.skip("that allocator has no snapshots")
    assert ran["captured"] == [True]


def test_a_capture_forbids_what_a_real_one_forbids(ran: Mapping[str, Any]) -> None:
    assert "capture" in ran["synchronised_capture"]
    assert ran["after_capture"] == 0.0


@pytest.mark.parametrize("library", ["linear_algebra", "fourier", "sparse"])
def test_libraries_that_it_has_not_are_refused(ran: Mapping[str, Any], library: str) -> None:
    assert ran[library].startswith("RuntimeError")


def test_cudnn_is_switched_off(ran: Mapping[str, Any]) -> None:
    assert ran["settings"] == [False, False]


def test_each_card_is_its_own(ran: Mapping[str, Any]) -> None:
    assert ran["cards"] == [[8, 9], [9, 0]]
    assert ran["peers"] is False


def test_a_full_card_says_what_pytorch_says(ran: Mapping[str, Any]) -> None:
    held, message = ran["small_card"]
    assert held == 23
    assert re.search(r"[Tt]ried to allocate 1024.00 MiB|Requested +: 1024.00 MiB", message)
    assert "23.52 GiB" in message


def test_a_larger_card_holds_it_all(ran: Mapping[str, Any]) -> None:
    assert ran["large_card"] == [30, None]


def test_addresses_are_the_same_in_each_run(cache: Path) -> None:
    first, second = (results("l4-24g", "seen.py")["addresses"] for _ in range(2))
    assert first == second
    assert len(set(first)) == 3


def test_a_process_can_choose_among_the_cards(cache: Path) -> None:
    seen = results("h100-80g,l4-24g", "seen.py", CUDA_VISIBLE_DEVICES="1")
    assert (seen["visible"], seen["all"], seen["total"]) == (1, 2, 23_612_293_120)


def test_a_known_context_is_taken_from_the_card(cache: Path) -> None:
    assert results("rtx-3090-24g", "seen.py")["taken"] == 256 * 2**20
    assert results("l4-24g", "seen.py")["taken"] == 0


def test_misuse_is_answered_as_cuda_answers_it(cache: Path) -> None:
    ok, invalid, out_of_memory, no_device = 0, 1, 2, 101
    assert results("a100-40g", "misused.py") == {
        "malloc": ok,
        "inside": invalid,
        "first": ok,
        "second": invalid,
        "host address": invalid,
        "null": ok,
        "too much": out_of_memory,
        "no device": no_device,
        "create": ok,
        "map": ok,
        "map twice": invalid,
        "map outside": invalid,
        "unmap half": invalid,
        "release": ok,
        "release twice": invalid,
        "unmap": ok,
        "given back": 4 * 2**20,
        "odd size": invalid,
    }
