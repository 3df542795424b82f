"""What is known, what isn't, and that nothing else changes."""

import io
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from memtrace.virtual_gpu import values
from tests.virtual_gpu.values import unread


@pytest.fixture(autouse=True, params=["grad", "no_grad", "inference_mode"])
def gradients(request):
    modes = {"grad": torch.enable_grad, "no_grad": torch.no_grad}
    with modes.get(request.param, torch.inference_mode)():
        yield


@pytest.fixture
def reads():
    """``reads()``: unknown reads in this test so far."""
    before = unread()
    return lambda: unread() - before


def test_a_device_that_is_the_default_holds_what_is_made_of_numbers():
    for device in ("cuda", "meta", "cpu"):
        with torch.device(device):
            made = torch.tensor([1, 2]), torch.as_tensor([1, 2]), torch.asarray([1, 2])
        assert [one.device.type for one in made] == [device] * 3


def test_what_comes_from_the_host_is_known(reads):
    made = [
        torch.tensor([1, 2], device="cuda"),
        torch.as_tensor(np.array([1, 2]), device="cuda"),
        torch.as_tensor([1, 2]).cuda(),
        torch.from_numpy(np.array([1, 2])).to("cuda", non_blocking=True),
        torch.tensor([1, 2]).pin_memory().cuda(non_blocking=True),
        torch.ones(1, device="cuda").new_tensor([1, 2], dtype=torch.long),
        torch.zeros(2, dtype=torch.long, device="cuda").copy_(torch.tensor([1, 2])),
        torch.empty(2, dtype=torch.long, device="cuda").copy_(torch.tensor([1, 2])),
        torch.arange(1, 3, device="cuda"),
        torch.nn.Parameter(torch.tensor([1.0, 2.0])).cuda(),
        torch.tensor([1, 2], device="cuda:0").to("cuda:1"),
    ]
    assert [tensor.tolist() for tensor in made] == [[1, 2]] * len(made)
    assert reads() == 0


def test_every_way_to_read_answers_from_what_is_known(reads):
    three = torch.tensor([1, 2, 3], device="cuda")
    into = torch.empty(3, dtype=torch.long)
    into.copy_(three)
    saved = io.BytesIO()
    torch.save(three, saved)
    saved.seek(0)
    assert three.cpu().tolist() == three.to("cpu").tolist() == into.tolist() == [1, 2, 3]
    assert torch.load(saved, map_location="cpu").tolist() == [1, 2, 3]
    assert three.cpu().numpy().sum() == 6
    assert three.sum().item() == int(three[2]) * 2 == 6
    assert [10, 20, 30][three[0]] == 20
    assert bool((three > 0).all()) and not torch.equal(three, three + 1)
    assert torch.allclose(three.float(), three.double().float())
    assert reads() == 0


def test_sizes_that_depend_on_values_are_those_of_the_cpu(reads):
    def sizes(device: str) -> list[torch.Tensor]:
        x = torch.tensor([[3, 0, 5], [0, 5, 3]], device=device)
        row = torch.tensor([True, False], device=device)
        assigned = x.clone()
        assigned[x > 2] = torch.arange(4, device=device)
        assigned[row] += 1
        return [
            x.nonzero(),
            x.flatten().nonzero(),
            *torch.where(x > 2),
            x[x > 2],
            x[row],
            x[:, x[0] > 0],
            torch.masked_select(x, x[0] > 0),
            *x.unique(return_inverse=True, return_counts=True),
            *torch.unique_consecutive(x.flatten(), return_counts=True),
            x.unique(dim=1),
            torch.bincount(x.flatten()),
            torch.repeat_interleave(x.flatten()),
            x.repeat_interleave(torch.tensor([2, 1], device=device), dim=0),
            torch.nn.functional.one_hot(x),
            torch.argwhere(x == 5),
            assigned,
        ]

    on_device = sizes("cuda")
    for actual, expected in zip(on_device, sizes("cpu"), strict=True):
        assert actual.is_cuda and actual.shape == expected.shape
        assert actual.cpu().tolist() == expected.tolist()
    assert reads() == 0


def test_sizes_need_the_mask_only(reads):
    unknown = torch.rand(3, 4, device="cuda")
    mask = torch.tensor([True, False, True], device="cuda")
    assert unknown[mask].shape == (2, 4)
    assert torch.masked_select(unknown, mask[:, None]).shape == (8,)
    unknown[mask] = torch.ones(2, 4, device="cuda")
    # As many places as values: on a real device it couldn't be otherwise.
    unknown[unknown > 0.5] = torch.ones(5, device="cuda")
    unknown[unknown > 0.5] = 1
    assert reads() == 0
    assert unknown[unknown > 0.5].shape == (0,)
    unknown.to_sparse()
    unknown[unknown[:, 0] > 0.5] = torch.ones(4, device="cuda")  # to any number of rows
    assert reads() == 3


def test_an_unknown_read_is_counted_where_it_happens():
    unknown = torch.rand(4, device="cuda") + 1
    before = values.summary()["places"]
    for _ in range(3):
        assert unknown.sum().item() == 0.0  # planted
    unknown.cpu()
    new = [place for place in values.summary()["places"] if place not in before]
    source = Path(__file__).read_text().splitlines()
    line = next(n for n, text in enumerate(source, 1) if "# planted" in text)
    name = test_an_unknown_read_is_counted_where_it_happens.__name__
    assert {"where": f"{__file__}:{line}:{name}", "op": "item"}.items() <= new[0].items()
    assert [place["where"] for place in new] == [
        f"{__file__}:{line}:{name}",
        f"{__file__}:{line + 1}:{name}",
    ]
    assert {place["op"] for place in new} == {"item", "copy to host"}


def test_something_unknown_makes_unknown_what_it_is_written_to(reads):
    unknown = torch.rand(2, device="cuda")
    whole = torch.zeros(6, device="cuda")
    alias = whole.view(2, 3)
    whole[3:5] = unknown
    assert alias[0].tolist() == [0, 0, 0]
    assert alias[1, 2].item() == 0
    assert reads() == 0
    alias[1].tolist()
    (whole * 0).sum().item()
    assert reads() == 2
    alias[1] = 7
    assert whole.tolist() == [0, 0, 0, 7, 7, 7]
    assert reads() == 2
    whole += unknown.sum()
    assert torch.ones_like(whole).tolist() == whole.new_full((6,), 1).tolist() == [1] * 6
    assert reads() == 2
    alias[0, 0].item()
    assert reads() == 3


def test_random_numbers_of_the_device_are_unknown_and_those_of_the_host_are_left_alone(reads):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    for tensor in (
        torch.zeros(3, device="cuda").uniform_(),
        torch.bernoulli(torch.full((3,), 0.5, device="cuda")),
        torch.nn.functional.dropout(torch.ones(3, device="cuda")),
        torch.randint(9, (3,), device="cuda"),
    ):
        tensor.tolist()
    assert reads() == 4
    assert torch.equal(torch.rand(3), expected)


def test_what_comes_back_from_the_host_unread_stays_unknown(reads):
    back = torch.rand(3, device="cuda").cpu().cuda()
    assert reads() == 1
    back.tolist()
    assert reads() == 2


def test_large_tensors_are_unknown(reads):
    torch.ones(1 << 20, device="cuda").sum().item()
    torch.zeros((), device="cuda").expand(1 << 40)[5].item()
    torch.arange(1 << 18, device="cuda").max().item()
    assert reads() == 1


def test_matrix_products_are_not_computed(reads):
    ones = torch.ones(2, 2, device="cuda")
    assert (ones + ones)[0, 0].item() == 2
    (ones @ ones)[0, 0].item()
    assert reads() == 1


def test_unusual_tensors(reads):
    half = torch.arange(6, dtype=torch.float16, device="cuda").view(2, 3)
    assert half.t()[1].tolist() == [1, 4]
    assert half.t().contiguous().flip(0).tolist() == [[2, 5], [1, 4], [0, 3]]
    assert torch.arange(2, dtype=torch.int32, device="cuda").view(torch.int16).tolist() == [
        0,
        0,
        1,
        0,
    ]
    turned = torch.tensor([1 + 2j], device="cuda").conj()
    turned += 1j
    assert turned.tolist() == [1 - 1j] and turned.imag.tolist() == [-1]
    assert torch.ones(0, 3, device="cuda").sum().item() == 0
    assert torch.empty(0, device="cuda").tolist() == []
    assert torch.tensor(5, device="cuda").expand(2, 2).tolist() == [[5, 5], [5, 5]]
    pair = [torch.ones(2, device="cuda"), torch.zeros(2, device="cuda")]
    torch._foreach_add_(pair, 1)
    assert [tensor.tolist() for tensor in pair] == [[2, 2], [1, 1]]
    out = torch.empty(0, device="cuda")
    torch.add(pair[0], 1, out=out)
    assert out.tolist() == [3, 3]
    assert reads() == 0


def test_tensors_that_are_none_of_the_devices_are_left_alone(reads):
    with FakeTensorMode():
        fake = torch.ones(3, device="cuda") + torch.tensor(1, device="cuda")
        assert fake.shape == (3,)
    assert (torch.ones(3, device="meta") + 1).is_meta
    wrapped = TwoTensor(torch.ones(3, device="cuda"), torch.ones(3, device="cuda")) + 1
    assert type(wrapped) is TwoTensor and wrapped.a.tolist() == [2, 2, 2]
    assert reads() == 0


def test_threads_follow_too(reads):
    found = []

    def work() -> None:
        found.append(torch.arange(3, device="cuda").tolist())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[0, 1, 2]] * 4
    assert reads() == 0


def test_a_graph_leaves_unknown_what_it_writes(reads):
    counter = torch.zeros(2, device="cuda")
    untouched = torch.ones(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = untouched + 1
        counter.add_(1)
    result.tolist()
    counter.tolist()
    assert untouched.tolist() == [1, 1]
    assert reads() == 2
    counter.zero_()
    assert counter.tolist() == [0, 0]
    graph.replay()
    counter.tolist()
    assert reads() == 3


def test_choices_are_placeholders_of_ordinary_tokens(reads):
    logits = torch.rand(2, 32000, device="cuda")
    chosen = [
        logits.argmax(-1, keepdim=True),
        logits.max(-1, keepdim=True).indices,
        logits.softmax(-1).multinomial(2),
        logits.topk(5).indices,
        logits.sort(descending=True).indices[:, :5],
        logits.argsort()[:, :5],
    ]
    for tokens in chosen:
        first, second = tokens.tolist()
        assert first == second == list(range(19776, 19776 + len(first)))
    scores = logits.topk(3).values
    assert scores.tolist() == [[-1, -2, -3]] * 2
    drawn = logits.softmax(-1).multinomial(3)
    assert logits.gather(1, drawn).tolist() == [[-1, -2, -3]] * 2
    assert reads() == 0
    logits.max(-1).values.tolist()
    logits.gather(1, drawn.clone()).tolist()
    assert reads() == 2


def test_a_router_serves_its_experts_in_turn(reads):
    chosen = torch.rand(12, 8, device="cuda").topk(2).indices
    assert torch.bincount(chosen.flatten()).tolist() == [3] * 8
    assert reads() == 0


def test_known_scores_are_chosen_from():
    scores = torch.tensor([[0.1, 0.7, 0.2]], device="cuda")
    assert scores.argmax(-1).tolist() == [1]
    assert scores.multinomial(1).tolist() == [[1]]
    values, places = scores.sort(descending=True)
    assert places.tolist() == [[1, 2, 0]]
    assert torch.allclose(values.cpu(), torch.tensor([[0.7, 0.2, 0.1]]))


def test_mirrors_die_with_their_storages():
    mirrors = values._known.mirrors
    before = len(mirrors.of), mirrors.bytes
    kept = [torch.ones(5, device="cuda") for _ in range(10)]
    views = [tensor[1:] for tensor in kept]
    del kept
    assert len(mirrors.of) == before[0] + 10
    assert values.summary()["mirror_bytes_peak"] >= mirrors.bytes == before[1] + 200
    del views
    assert (len(mirrors.of), mirrors.bytes) == before


def _program() -> None:
    """No size in it depends on a value, and no two gradients meet in one tensor."""
    layers = [torch.nn.Linear(64, 64, device="cuda") for _ in range(3)]
    optimizer = torch.optim.AdamW([p for layer in layers for p in layer.parameters()])
    for _ in range(2):
        x = torch.tensor([[1.0] * 64] * 32, device="cuda")
        q, k, v = (layer(x).view(1, 4, 32, 16) for layer in layers)
        mask = torch.ones(32, 32, dtype=torch.bool, device="cuda").tril()
        torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    ids = torch.arange(32, device="cuda")
    ids[ids > 3] = 0
    ids.float().softmax(0).multinomial(4, replacement=True).topk(2)
    torch.rand(2, 1000, device="cuda").sort().values.cumsum(-1).argmax(-1)


def test_the_device_allocates_as_without(gradients):
    def figures() -> dict[str, int]:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
        with torch.inference_mode(False), torch.enable_grad():
            _program()
        return torch.cuda.memory_stats()

    figures()  # cuBLAS takes its workspace once
    followed = figures()
    with _disable_current_modes():
        plain = figures()
    assert followed == plain
    assert followed["allocated_bytes.all.peak"] > 0


def test_nobody_else_sees_what_happens_on_the_host():
    def seen() -> list[str]:
        calls: list[str] = []

        class Operators(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                calls.append(str(func))
                return func(*args, **(kwargs or {}))

        class Functions(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                calls.append(getattr(func, "__name__", str(func)))
                return func(*args, **(kwargs or {}))

        with Operators(), Functions():
            x = torch.arange(5, device="cuda")
            x[1:].add_(torch.ones(4, dtype=torch.long, device="cuda"))
            x.argmax(), x.sum().item(), torch.ops.aten.mul(x, 2)
        return calls

    followed = seen()
    with _disable_current_modes():
        plain = seen()
    assert followed == plain


def test_tensors_inside_the_data_of_a_tensor_are_read(reads):
    known = torch.tensor([3, 1], device="cuda")
    assert torch.tensor([known[0], known[1]]).tolist() == [3, 1]
    assert torch.as_tensor([[known[0], 2], [4, known[1]]], device="cuda").tolist() == [
        [3, 2],
        [4, 1],
    ]
    assert torch.tensor((known[1],)).dtype == torch.int64
    assert reads() == 0
    torch.tensor([torch.rand(2, device="cuda")[0]])
    assert reads() == 1
