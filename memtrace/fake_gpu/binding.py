"""What ``torch.cuda`` asks PyTorch's CUDA bindings, answered from the catalogue and our allocator.

The functions stand in ``torch._C`` under PyTorch's own names, also where it was built without CUDA;
so everything above them, ``torch.cuda`` and the recorder among it, is as on a card.
"""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _device

from memtrace.devices import Device
from memtrace.fake_gpu import streams
from memtrace.fake_gpu.memory import FakeMemory
from memtrace.virtual_gpu.child import refusing

_DeviceType: Any = torch._C._autograd.DeviceType
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"


@dataclass(frozen=True)
class Properties:
    """As ``torch.cuda.get_device_properties`` gives them."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    max_threads_per_multi_processor: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    L2_cache_size: int
    is_integrated: bool
    uuid: str
    shared_memory_per_block: int = 49_152
    warp_size: int = 32
    regs_per_multiprocessor: int = 65_536
    is_multi_gpu_board: bool = False
    gcnArchName: str = ""


def install(memory: FakeMemory, cards: list[Device]) -> None:
    """Make PyTorch see the cards."""
    properties = [_properties(number, card) for number, card in enumerate(cards)]
    binding: Any = torch._C
    for name, function in (_devices(properties) | _memory(memory)).items():
        setattr(binding, f"_cuda_{name}", function)
    cuda: Any = torch.cuda
    cuda._exchange_device = streams.exchange_device
    cuda._maybe_exchange_device = streams.exchange_device
    cuda._get_device_properties = properties.__getitem__
    cuda.device_count = lambda: len(cards)
    cuda._cudart = SimpleNamespace(
        cudaMemGetInfo=lambda device: (memory.cards[device].device.free_bytes, cards[device].total),
        cudaProfilerStart=lambda: 0,
        cudaProfilerStop=lambda: 0,
        cudaError=SimpleNamespace(success=0),  # what torch.cuda.check_error compares with
    )
    cuda.default_generators = tuple(torch.Generator() for _ in cards)
    for owner in (cuda, cuda.streams):
        owner.Stream, owner.Event = streams.Stream, streams.Event
    for name in ("capture_begin", "replay"):
        refuse = refusing("a fake GPU can't record CUDA graphs; use the engine virtual")
        setattr(cuda.CUDAGraph, name, refuse)
    accelerator = torch.accelerator
    accelerator.is_available = lambda: True
    accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
    accelerator.device_count = cuda.device_count
    accelerator.synchronize = lambda *_: None
    plain = torch.autograd.graph._engine_run_backward
    refuse = refusing("a fake GPU can't compute gradients; use the engine virtual")
    for module in (torch.autograd, torch.autograd.graph):
        module._engine_run_backward = lambda tensors, *rest, **options: (  # type: ignore
            refuse if any(one.is_cuda for one in tensors) else plain
        )(tensors, *rest, **options)
    memory.stream_of = streams.stream_of
    torch.Tensor.record_stream = lambda tensor, stream: memory.record_stream(  # type: ignore
        tensor.untyped_storage(), stream
    )
    _install_guard()


def _properties(number: int, card: Device) -> Properties:
    major, minor = card.capability
    return Properties(
        name=card.name,
        major=major,
        minor=minor,
        total_memory=card.total,
        multi_processor_count=card.processors,
        max_threads_per_multi_processor=card.threads_per_processor,
        shared_memory_per_block_optin=card.shared_per_block,
        shared_memory_per_multiprocessor=card.shared_per_processor,
        L2_cache_size=card.l2_cache,
        is_integrated=card.integrated,
        uuid=f"00000000-0000-0000-0000-{number:012x}",
    )


def _devices(properties: list[Properties]) -> dict[str, Callable[..., Any]]:
    """Functions about devices and streams, by their names in ``torch._C._cuda_…``."""

    def nothing(*_: Any) -> None:
        pass

    return {
        "init": nothing,
        "isInBadFork": lambda: False,
        "hasPrimaryContext": lambda device: True,
        "getDeviceCount": lambda: len(properties),
        "getDevice": streams.current_device,
        "setDevice": streams.set_device,
        "exchangeDevice": streams.exchange_device,
        "maybeExchangeDevice": streams.exchange_device,
        "canDeviceAccessPeer": lambda *_: False,
        "synchronize": nothing,
        "sleep": nothing,
        "ipc_collect": nothing,
        "getArchFlags": getattr(torch._C, "_cuda_getArchFlags", lambda: None),
        "getCurrentStream": lambda device: (streams.stream_of(device), device, streams.CUDA),
        "getCurrentRawStream": streams.stream_of,
        "getDefaultStream": lambda device: (0, device, streams.CUDA),
        "setStream": streams.set_stream,
        "isCurrentStreamCapturing": lambda: False,
    }


def _memory(memory: FakeMemory) -> dict[str, Callable[..., Any]]:
    """Functions about memory."""

    def empty_cache() -> None:
        for device in range(len(memory.cards)):
            memory.call(device, lambda allocator: allocator.empty_cache())

    def record(enabled: str | None, context: str | None = None, *rest: Any) -> None:
        # After the context: stacks, max_entries, clear_history, …
        memory.record(enabled, context, clear=len(rest) > 2 and bool(rest[2]))

    def snapshot(wanted: Any = None) -> dict[str, Any]:
        return memory.snapshot(traces=wanted is None or (len(wanted) > 2 and bool(wanted[2])))

    def set_fraction(fraction: float, device: int) -> None:
        memory.set_fraction(device, fraction)

    return {
        "emptyCache": empty_cache,
        "clearCublasWorkspaces": memory.clear_workspaces,
        "memoryStats": memory.statistics,
        "resetPeakMemoryStats": lambda device: memory.reset(device, peaks=True),
        "resetAccumulatedMemoryStats": lambda device: memory.reset(device, peaks=False),
        "hostMemoryStats": dict,
        "memorySnapshot": snapshot,
        "record_memory_history": record,
        "isHistoryEnabled": lambda: memory.recording,
        "attach_out_of_memory_observer": memory.observers.append,
        "setMemoryMetadata": lambda text: setattr(memory, "text", text),
        "getMemoryMetadata": lambda: memory.text,
        "memoryMetadataSupported": lambda: True,
        "annotateMemory": memory.annotate,
        "getAllocatorBackend": lambda: "native",
        "getMemoryFraction": lambda device: memory.cards[device].allocator.fraction,
        "setMemoryFraction": set_fraction,
        "cudaCachingAllocator_raw_alloc": lambda size, stream: memory.malloc(
            size, streams.current_device(), stream
        ),
        "cudaCachingAllocator_raw_delete": lambda address: memory.free(
            address, streams.current_device()
        ),
    }


def _install_guard() -> None:
    """Have PyTorch's C++ switch between the devices of ``cuda`` by doing nothing.

    A build for CUDA without a card brings a guard for that. In one for the CPU, and in torch 2.8,
    there is none, and indexing would fail; there the guard of meta tensors, which does nothing
    either, serves.
    """
    if torch.version.cuda is not None and hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
        torch._C._ensureCUDADeviceGuardSet()
        return
    folder = Path(torch.__file__).parent / "lib"
    library = next(path for path in folder.glob("libc10.*"))
    guards = (ctypes.c_void_p * 32).in_dll(ctypes.CDLL(str(library)), _REGISTRY)
    guards[_DeviceType.CUDA.value] = guards[_DeviceType.Meta.value]
    # What it doesn't know is the number of the device that ``cuda`` means.
    _device._device_constructors()  # it knows makers by identity: those that ours call
    for maker in ("tensor", "as_tensor", "asarray"):
        setattr(torch, maker, _host_first(getattr(torch, maker)))
    plain = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if args and isinstance(args[0], (int, str, torch.device)):
            args = (_numbered(args[0]), *args[1:])
        elif options.get("device") is not None:
            options["device"] = _numbered(options["device"])
        return plain(tensor, *args, **options)

    def cuda(tensor: torch.Tensor, device: Any = "cuda", **options: Any) -> torch.Tensor:
        return to(tensor, "cuda" if device is None else device, **options)

    torch.Tensor.to, torch.Tensor.cuda = to, cuda  # type: ignore[assignment, method-assign]


def _numbered(device: Any) -> torch.device:
    """``cuda`` → ``cuda:0``, or the current one."""
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found == torch.device("cuda"):
        return torch.device("cuda", streams.current_device())
    return found


def _host_first(plain: Any) -> Any:
    """A maker of tensors from values, which can't copy them to a card by itself."""

    @functools.wraps(plain)
    def make(data: Any, *args: Any, **options: Any) -> Any:
        # get_default_device() would make a tensor to find out.
        device = torch.device(options.get("device") or _device.CURRENT_DEVICE or "cpu")
        if device.type != "cuda":
            return plain(data, *args, **options)
        if isinstance(data, torch.Tensor) and data.device == _numbered(device):
            return plain(data, *args, **options)
        grows = options.pop("requires_grad", False)
        made = plain(data, *args, **{**options, "device": "cpu"}).to(device)
        return made.requires_grad_(grows)

    return make
