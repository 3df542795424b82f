"""The figures of fake cards, on their way to the process that uses them."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from memtrace.devices import Device
from memtrace.fake_gpu import VARIABLE
from memtrace.trace.manifest import Knowledge


@dataclass(frozen=True)
class Card:
    """What a process knows of one fake card; as :class:`memtrace.devices.Device`."""

    name: str
    total: int
    context: int | None
    capability: tuple[int, int]
    processors: int
    l2_cache: int
    integrated: bool
    shared_per_block: int
    shared_per_processor: int
    threads_per_processor: int
    blocks_per_processor: int
    cublas_workspace: int


@dataclass(frozen=True)
class FakeGpu:
    """Fake GPUs, ready to be used; as :class:`memtrace.virtual_gpu.launch.VirtualGpu`.

    Attributes:
        devices: the cards; none: what is planned runs on the CPU, whose tensors are fake.
        variables: what to add to the environment of a child.
    """

    devices: tuple[Device, ...]
    variables: Mapping[str, str]
    knowledge = Knowledge.MODELLED

    def figures(self) -> dict[str, Any]:
        """What a manifest keeps: every figure of every card, with its source."""
        return {"devices": [asdict(device) for device in self.devices]}


def prepare(devices: Sequence[Device]) -> FakeGpu:
    """What makes the PyTorch of a child see these cards."""
    figures = [
        {name: getattr(device, name) for name in Card.__dataclass_fields__} for device in devices
    ]
    # A card that the machine has must not answer.
    variables = {VARIABLE: json.dumps(figures), "CUDA_VISIBLE_DEVICES": ""}
    return FakeGpu(tuple(devices), variables)


def cards() -> list[Card]:
    """Those that this process was given."""
    return [
        Card(**{**one, "capability": tuple(one["capability"])})
        for one in json.loads(os.environ[VARIABLE])
    ]
