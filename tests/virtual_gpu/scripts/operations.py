"""Runs what PyTorch does on a GPU and prints, as JSON, what came of each: a value or an error."""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from memtrace.virtual_gpu.child import enter

enter(torch)
DEVICE = "cuda"
results: dict[str, Any] = {}


def note(run: Callable[[], Any]) -> None:
    try:
        value = run()
        results[run.__name__] = list(value) if isinstance(value, torch.Size) else value
    except Exception as error:
        results[run.__name__] = f"{type(error).__name__}: {error}"


def half(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device=DEVICE, dtype=torch.bfloat16)


def single(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device=DEVICE)


@note
def first_product() -> int:
    before = torch.cuda.memory_allocated()
    a, b = half(64, 64), half(64, 64)
    c = a @ b
    return torch.cuda.memory_allocated() - before - sum(x.nbytes for x in (a, b, c))


@note
def free_memory() -> bool:
    free, total = torch.cuda.mem_get_info()
    return total - free == torch.cuda.memory_reserved()


def attention(backend: SDPBackend) -> list[int]:
    q, k, v = (half(1, 8, 128, 64).requires_grad_() for _ in range(3))
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out.sum().backward()
    return [*out.shape, *(q.grad.shape if q.grad is not None else ())]


@note
def flash() -> list[int]:
    return attention(SDPBackend.FLASH_ATTENTION)


@note
def efficient() -> list[int]:
    return attention(SDPBackend.EFFICIENT_ATTENTION)


@note
def math() -> list[int]:
    return attention(SDPBackend.MATH)


@note
def masked() -> torch.Size:
    q, mask = half(1, 8, 128, 64), half(1, 1, 128, 128)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).shape


@note
def topk() -> torch.Size:
    return half(4, 1_000_000).topk(50).values.shape


@note
def sort() -> torch.Size:
    return half(1_000_000).sort().values.shape


@note
def cumsum() -> torch.Size:
    return single(4, 32_000).cumsum(-1).shape


@note
def multinomial() -> torch.Size:
    return torch.multinomial(single(4, 320), 7, replacement=True).shape


@note
def generator() -> torch.Size:
    return torch.randn(10, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)).shape


@note
def convolution() -> torch.Size:
    return torch.nn.Conv2d(3, 8, 3, device=DEVICE)(single(1, 3, 32, 32)).shape


@note
def autocast() -> str:
    with torch.autocast("cuda"):
        return str(F.linear(single(4, 64), single(64, 64)).dtype)


@note
def training_step() -> bool:
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
    ).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    model(single(4, 64)).sum().backward()
    optimizer.step()
    return all(parameter.grad is not None for parameter in model.parameters())


@note
def moved_model() -> int:
    before = torch.cuda.memory_allocated()
    model = torch.nn.Linear(1024, 1024, bias=False).to(DEVICE)
    return torch.cuda.memory_allocated() - before - model.weight.nbytes


@note
def pinned() -> list[bool]:
    host = torch.arange(1000.0).pin_memory()
    device = host.to(DEVICE, non_blocking=True)
    return [host.is_pinned(), float(host[7]) == 7.0, device.is_cuda]


@note
def side_stream() -> list[bool]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = half(1_000_000).add_(1)
    x.record_stream(torch.cuda.current_stream())
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    half(10).add_(1)
    end.record()
    before = end.query()
    torch.cuda.synchronize()
    return [before, end.query(), start.elapsed_time(end) > 0]


@note
def polled() -> bool:
    event = torch.cuda.Event()
    half(10).add_(1)
    event.record()
    return any(event.query() for _ in range(10))


@note
def freed_across_streams() -> list[bool]:
    """A block that another stream used isn't handed out again before that stream is done."""
    stream = torch.cuda.Stream()
    x = half(3_000_000)
    address = x.data_ptr()
    with torch.cuda.stream(stream):
        x.add_(1)
        x.record_stream(stream)
    del x
    before = half(3_000_000)
    before.add_(1)
    stream.synchronize()
    half(10).add_(1)
    after = half(3_000_000)
    return [before.data_ptr() == address, after.data_ptr() == address]


@note
def captured() -> list[bool]:
    x = half(64, 64)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x @ x
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (x @ x).relu()
    graph.replay()
    pools = {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()}
    return [len(pools) == 2]


@note
def synchronised_capture() -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        half(64).add_(1).sum().item()


@note
def after_capture() -> float:
    return half(64).sum().item()


@note
def read() -> list[float]:
    return torch.arange(3.0, device=DEVICE).tolist()


@note
def linear_algebra() -> None:
    torch.linalg.inv(single(64, 64))


@note
def fourier() -> None:
    torch.fft.rfft(single(64))


@note
def sparse() -> None:
    torch.sparse.mm(torch.eye(8).to_sparse().to(DEVICE), single(8, 8))


@note
def used() -> bool:
    return torch.cuda.device_memory_used() == torch.cuda.memory_reserved()


@note
def addresses() -> list[int]:
    torch.cuda.empty_cache()
    return [half(size).data_ptr() for size in (10, 10_000_000, 30_000_000)]


@note
def settings() -> list[bool]:
    return [torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cudnn.enabled]


@note
def cards() -> list[Any]:
    return [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]


@note
def peers() -> bool:
    return torch.cuda.can_device_access_peer(0, 1)


def filled(device: str) -> list[Any]:
    """How many GiB a card holds, up to 30, and what PyTorch says when it is full."""
    torch.cuda.empty_cache()
    blocks = []
    try:
        while len(blocks) < 30:
            blocks.append(torch.empty(2**30, dtype=torch.uint8, device=device))
    except torch.OutOfMemoryError as error:
        return [len(blocks), str(error)]
    return [len(blocks), None]


@note
def small_card() -> list[Any]:
    return filled("cuda:0")


@note
def large_card() -> list[Any]:
    return filled("cuda:1")


print(json.dumps(results))
