"""What a process on fake GPUs does right after it has imported torch."""

import os
import sys
from types import ModuleType

from memtrace.fake_gpu.cards import Card, cards
from memtrace.virtual_gpu import UNFOLLOWED

#: Set once a process has said that its GPUs are fake; its children inherit it.
_SAID = "MEMTRACE_FAKE_GPU_SAID"


def enter(torch: ModuleType) -> None:
    """Make PyTorch see the fake GPUs, and say so."""
    from memtrace.allocator.settings import Settings, parse_version
    from memtrace.fake_gpu import attention, binding, mode, tensors
    from memtrace.fake_gpu.memory import FakeMemory
    from memtrace.virtual_gpu import values
    from memtrace.virtual_gpu.child import without_compilers

    found = cards()
    if not found:
        from memtrace.fake_gpu import host

        tensors.install(host.HostMemory())
        host.install()
        host.FakeHost().__enter__()
        return
    _say(found)
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
    values.start(follow=follow, device=mode.FakeGpu)


def _say(found: list[Card]) -> None:
    if _SAID in os.environ:
        return
    os.environ[_SAID] = "1"
    names = [one.name for one in found]
    counted = {name: names.count(name) for name in names}
    said = ", ".join(f"{n}× {name}" if n > 1 else name for name, n in counted.items())
    print(f"memtrace: fake GPU {said}: nothing is computed, times mean nothing", file=sys.stderr)
