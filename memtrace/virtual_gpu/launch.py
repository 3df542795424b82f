"""The environment in which the PyTorch of a child process sees virtual GPUs."""

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from memtrace.devices import Device, choose
from memtrace.errors import MemtraceError
from memtrace.trace.manifest import Knowledge
from memtrace.virtual_gpu import VARIABLE
from memtrace.virtual_gpu.libraries import build
from memtrace.virtual_gpu.torches import find_torch


@dataclass(frozen=True)
class VirtualGpu:
    """GPUs that aren't there, ready to be used; :mod:`memtrace.fake_gpu.launch` makes some too.

    Attributes:
        devices: the cards; none: what is planned runs on the CPU, whose tensors are fake.
        variables: what to add to the environment of a child.
        knowledge: how a run on them knows a byte.
    """

    devices: tuple[Device, ...]
    variables: Mapping[str, str]
    knowledge: Knowledge = Knowledge.VIRTUAL

    def figures(self) -> dict[str, Any]:
        """What a manifest keeps: every figure of every card, with its source."""
        return {"devices": [asdict(device) for device in self.devices]}


def prepare(devices: Sequence[Device], command: Sequence[str] = ()) -> VirtualGpu:
    """Build what is missing, for the PyTorch that ``command`` will import.

    Raises:
        MemtraceError: this machine or that PyTorch can't have a virtual GPU.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise MemtraceError(
            "the virtual GPU needs Linux on x86-64, and this is "
            f"{platform.system()} on {platform.machine()}"
        )
    torch = find_torch(command)
    built = build(torch)
    entries = [_entry(device, built.architectures) for device in devices]
    preload = [*map(str, built.libraries), os.environ.get("LD_PRELOAD", "")]
    return VirtualGpu(
        tuple(devices),
        {
            # Preloaded rather than searched for: PyTorch's own search path comes before
            # LD_LIBRARY_PATH, and a library that is loaded already comes before any path.
            "LD_PRELOAD": ":".join(filter(None, preload)),
            # The machine's own GPUs may be hidden; these are not.
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(len(devices)))),
            VARIABLE: ";".join([f"{torch.cuda_number}|{torch.version}", *entries]),
        },
    )


def environment(specs: Sequence[str]) -> dict[str, str]:
    """Variables for a child of this interpreter: ``environment(["2×a100-40g"])``.

    Raises:
        MemtraceError: an unknown card, or no virtual GPU can be had.
    """
    return dict(prepare(choose(",".join(specs))).variables)


def _entry(device: Device, architectures: Sequence[int]) -> str:
    """A device as ``src/device.c`` reads it."""
    major, minor = device.capability
    # Of a capability's kernels, the newest that the card can run.
    fitting = [number for number in architectures if 10 * major <= number <= 10 * major + minor]
    fields = (
        device.name,
        device.total,
        device.context or 0,
        major,
        minor,
        max(fitting, default=10 * major + minor),
        device.processors,
        device.l2_cache,
        device.shared_per_block,
        device.shared_per_processor,
        device.threads_per_processor,
        device.blocks_per_processor,
        int(device.integrated),
        device.pool or device.total,
    )
    return "|".join(map(str, fields))
