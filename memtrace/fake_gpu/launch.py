"""The environment in which the PyTorch of a child process sees fake GPUs."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from memtrace.devices import Device
from memtrace.fake_gpu import VARIABLE
from memtrace.trace.manifest import Knowledge
from memtrace.virtual_gpu.launch import VirtualGpu


def prepare(devices: Sequence[Device]) -> VirtualGpu:
    """What makes the PyTorch of a child see these cards; none: it plans for the CPU."""
    figures = json.dumps([asdict(device) for device in devices])
    # A card that the machine has must not answer.
    variables = {VARIABLE: figures, "CUDA_VISIBLE_DEVICES": ""}
    return VirtualGpu(tuple(devices), variables, Knowledge.MODELLED)
