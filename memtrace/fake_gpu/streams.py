"""Streams and events of fake GPUs: names only, since nothing runs."""

import threading
from itertools import count
from typing import Any

import torch
from torch.cuda._utils import _get_device_index

#: ``torch._C._autograd.DeviceType`` of CUDA.
CUDA = 1

_numbers = count(1)


class _Current(threading.local):
    """Where a thread is: on the first card, and on its default stream."""

    device = 0

    def __init__(self) -> None:
        self.streams: dict[int, int] = {}


_current = _Current()


def stream_of(device: int) -> int:
    """The number of the stream that the calling thread is on; 0 is the default one."""
    return _current.streams.get(device, 0)


def set_stream(stream_id: int, device_index: int, device_type: int = CUDA) -> None:
    """As ``torch._C._cuda_setStream``: the device becomes the current one, too."""
    _current.streams[device_index] = stream_id
    set_device(device_index)


def current_device() -> int:
    """The number of the calling thread's device."""
    return _current.device


def set_device(device: int) -> None:
    """Make it the calling thread's."""
    _current.device = device


def exchange_device(device: int) -> int:
    """Make it the calling thread's, unless it is negative; the one before, or -1."""
    if device < 0:
        return -1
    before = current_device()
    set_device(device)
    return before


class Stream:
    """As :class:`torch.cuda.Stream`."""

    def __init__(
        self,
        device: Any = None,
        priority: int = 0,
        *,
        stream_id: int | None = None,
        device_index: int | None = None,
        device_type: int = CUDA,
    ) -> None:
        if device_index is None:
            device_index = _get_device_index(device, optional=True)
        self.stream_id = next(_numbers) if stream_id is None else stream_id
        self.device_index = device_index
        self.device_type = device_type
        self.priority = priority

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.device_index)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def wait_event(self, event: "Event") -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: "Stream") -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        return True

    def record_event(self, event: "Event | None" = None) -> "Event":
        return event or Event()

    def __enter__(self) -> "Stream":
        self._before: Any = torch.cuda.stream(self)  # type: ignore[arg-type]
        self._before.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._before.__exit__(*error)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and hash(self) == hash(other)

    def __hash__(self) -> int:
        return hash((self.device_index, self.stream_id))


class Event:
    """As :class:`torch.cuda.Event`; everything has happened already."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.cuda_event = 0

    def record(self, stream: Stream | None = None) -> None:
        """There is nothing to be recorded."""

    def wait(self, stream: Stream | None = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        """Times mean nothing."""
        return 0.0
