"""What a process on fake GPUs does right after it has imported torch."""

import json
import os
from types import ModuleType

from memtrace.devices import Device
from memtrace.fake_gpu import VARIABLE
from memtrace.virtual_gpu import UNFOLLOWED


def enter(torch: ModuleType) -> None:
    """Make PyTorch see the fake GPUs, and say so."""
    from memtrace.allocator.settings import Settings, parse_version
    from memtrace.fake_gpu import attention, binding, mode, products, tensors
    from memtrace.fake_gpu.memory import FakeMemory
    from memtrace.virtual_gpu import values
    from memtrace.virtual_gpu.child import say, without_compilers

    found = _cards()
    if not found:
        from memtrace.fake_gpu import host

        tensors.install(host.HostMemory())
        host.install()
        host.FakeHost().__enter__()
        return
    say("fake", [card.name for card in found])
    conf = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    version = parse_version(torch.__version__)
    memory = FakeMemory(found, Settings.parse(conf, version), version, conf)
    tensors.install(memory)
    binding.install(memory, found)
    attention.install()
    without_compilers(torch)
    follow = not os.environ.get(UNFOLLOWED)
    if not follow:
        mode.tell = values.told
        products.install()
    values.start(follow=follow, device=mode.FakeGpu)


def _cards() -> list[Device]:
    """Those that this process was given."""
    return [
        Device(**{**one, "capability": tuple(one["capability"])})
        for one in json.loads(os.environ[VARIABLE])
    ]
