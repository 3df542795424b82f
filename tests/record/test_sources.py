"""What the tensor source books, against what PyTorch says is alive."""

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace import record_here, scopes
from memtrace.analysis.accounts import accounts
from memtrace.analysis.identities import check
from memtrace.analysis.process import process_memory
from memtrace.trace.reader import open_trace
from memtrace.trace.schema import Action
from tests.record.books import allocations, booked


def test_views_and_in_place_operators_allocate_nothing(record) -> None:
    def work() -> None:
        x = torch.zeros(8, 8)
        x.t().add_(1)[0].mul_(2)
        x.view(-1).unsqueeze(0).expand(4, 64)
        x.detach().reshape(64)  # contiguous, so a view

    assert allocations(record(work)) == [("aten.zeros.default", 256)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_reshape_that_copies_is_booked_in_every_grad_mode(record, mode) -> None:
    def work() -> None:
        with mode():
            torch.zeros(8, 8).t().reshape(64)

    sizes = [size for _, size in allocations(record(work))]
    assert sizes == [256, 256]


def test_a_composite_operator_shows_its_temporaries_under_inference_mode(record) -> None:
    """linear() of a 3-D input is a matmul and an addition there as elsewhere."""

    def work(mode) -> None:
        with mode():
            weight, bias = torch.zeros(16, 8), torch.zeros(16)
            torch.nn.functional.linear(torch.zeros(2, 4, 8).transpose(0, 1), weight, bias)

    plain = record(lambda: work(torch.no_grad))
    inference = record(lambda: work(torch.inference_mode))
    assert sum(size for _, size in allocations(plain)) == sum(
        size for _, size in allocations(inference)
    )


def test_resizing_in_place_moves_the_bytes(record) -> None:
    def work() -> None:
        x = torch.zeros(4)
        with scopes.component("Temp"):
            torch.add(torch.ones(16), 1, out=x.resize_(0))

    moves = [(a, c, s) for a, c, s, _ in booked(record(work))]
    assert moves[0] == (Action.ALLOC, "other", 16)
    # resize_(0) keeps the storage; out= then enlarges it, and it stays what it was: "other".
    assert (Action.FREE, "other", 16) in moves
    assert (Action.ALLOC, "other", 64) in moves


def test_a_list_of_outputs_and_torch_tensor_are_booked(record) -> None:
    def work() -> None:
        torch.tensor([1.0, 2.0])
        torch.topk(torch.arange(10.0), 3)

    assert [size for _, size in allocations(record(work))] == [8, 40, 12, 24]


def test_meta_tensors_are_booked_on_their_own_device(record) -> None:
    process = record(lambda: torch.zeros(1 << 40, device="meta") + 1)
    (account,) = accounts(process)
    assert (account.device, account.allocated.peak) == ("meta", 2 * 4 << 40)


def test_sparse_tensors_are_reported_as_unseen(record) -> None:
    process = record(lambda: torch.eye(4).to_sparse() * 2)
    assert any("without a storage" in text for text in process.manifest["unseen"])


def test_a_storage_found_later_is_adopted(record) -> None:
    array = np.zeros(1024, dtype=np.float32)
    process = record(lambda: scopes.retag(torch.from_dlpack(array), "Temp"))
    assert booked(process)[0] == (Action.ALLOC, "Temp", 4096, "adopted")


def test_stacks_name_the_users_line(record) -> None:
    def allocate_here() -> torch.Tensor:
        return torch.zeros(4)

    process = record(allocate_here, stacks=2)
    context = process.events["context"][0]
    frames = process.stacks["frames"][process.contexts["stack"][context]]
    assert len(frames) == 2
    assert frames[0].startswith(__file__) and frames[0].endswith("allocate_here")


def test_components_scopes_and_retags(record) -> None:
    def work() -> None:
        with scopes.request("r1", prompt_tokens=7) as request:
            with scopes.phase("prefill"), scopes.layer(3), scopes.component("Act"):
                x = torch.zeros(4)
                with scopes.component("Temp"):
                    y = x + 1
            scopes.retag(x, "KV_res/full")
            scopes.retag(x[1:], "KV_res/full")  # the same storage, already there: no event
            request.first_token()
            request.generated_tokens = 2
        del x, y

    process = record(work)
    actions = [(action, component) for action, component, _, _ in booked(process)]
    assert actions == [
        (Action.ALLOC, "Act"),
        (Action.ALLOC, "Temp"),
        (Action.RETAG, "KV_res/full"),
        (Action.FREE, "KV_res/full"),
        (Action.FREE, "Temp"),
    ]
    assert process.contexts["previous"][process.events["context"][2]] == "Act"
    requests = process.requests
    assert (requests["name"][0], requests["prompt_tokens"][0]) == ("r1", 7)
    assert (requests["generated_tokens"][0], requests["outcome"][0]) == (2, "ok")
    assert requests["start_us"][0] <= requests["first_token_us"][0] <= requests["end_us"][0]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (torch.OutOfMemoryError("full"), "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried…"), "oom"),
        (RuntimeError("shapes differ"), "error"),
        (KeyError("x"), "error"),
    ],
)
def test_a_request_that_fails_says_how(record, error, outcome) -> None:
    def work() -> None:
        torch.zeros(1)
        with pytest.raises(type(error)), scopes.request("r"):
            raise error

    assert record(work).requests["outcome"] == [outcome]


def test_a_wrong_component_is_refused_while_recording(record) -> None:
    def work() -> None:
        with pytest.raises(ValueError, match="not a component"):
            scopes.component("KV")
        with pytest.raises(ValueError, match="not a component"):
            scopes.retag(torch.zeros(1), "cache")

    record(work)


OPERATIONS: list[Callable[[list[torch.Tensor], int], object]] = [
    lambda pool, n: pool.append(torch.zeros(n + 1)),
    lambda pool, n: pool.append(pool[n % len(pool)] * 2) if pool else None,
    lambda pool, n: pool.append(pool[n % len(pool)][: n % 7]) if pool else None,
    lambda pool, n: pool.pop(n % len(pool)) if pool else None,
    lambda pool, n: pool.append(torch.cat(pool[-3:])) if pool else None,
    lambda pool, n: pool.append(pool[n % len(pool)].view(torch.uint8)) if pool else None,
    lambda pool, n: scopes.retag(pool[n % len(pool)], "KV_res/full") if pool else None,
    lambda pool, n: pool[n % len(pool)].add_(1) if pool else None,
]


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(OPERATIONS),
            st.integers(0, 400),
            st.sampled_from(["Act", "Temp", "Hidden"]),
        ),
        max_size=40,
    )
)
def test_the_books_equal_the_living_storages_at_every_step(steps) -> None:
    """Σ tensor components = bytes of the distinct storages alive, after each operation."""

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        truth = []
        with record_here(Path(folder) / "run") as session:
            pool: list[torch.Tensor] = []
            for operation, number, component in steps:
                with scopes.component(component):
                    operation(pool, number)
                alive = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in pool}
                truth.append((session._ledger.position, sum(alive.values())))
            pool.clear()
        trace = open_trace(Path(folder) / "run")
        process = trace.processes[0]
        found = accounts(process)
        for account in found:
            identities = check(account, process_memory(trace, process, account.device))
            assert identities.hold, identities.problem
            total = sum(one.levels[-1] for one in account.components.values())
            assert total == account.allocated.levels[-1] == 0
        for position, expected in truth:
            read = sum(one.allocated.read_one(position - 1) for one in found)
            by_component = sum(
                series.read_one(position - 1) for one in found for series in one.components.values()
            )
            assert read == by_component == expected
