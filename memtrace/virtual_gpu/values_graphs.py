"""CUDA graphs: what is called while one is recorded happens at each replay, with other values.

So everything that a recording graph writes to or returns is unknown, then and after every replay.
"""

import functools
import weakref
from typing import Any

import torch
from torch import Tensor

from memtrace.virtual_gpu.values_known import Known
from memtrace.virtual_gpu.values_rules import Kind, Rule, written


class Recording:
    """The storages that a graph writes to."""

    def __init__(self) -> None:
        self._storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def call(self, known: Known, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator while the graph is recorded."""
        out = func._op(*args, **kwargs)
        touched = written(rule, args, kwargs)
        if rule.kind is not Kind.WRITE:
            touched += [item for item in _flat(out) if isinstance(item, Tensor)]
        for tensor in touched:
            if tensor.is_cuda and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                self._storages.add(storage)
                known.mirrors.drop(storage._cdata)
        return out

    def forget(self, known: Known) -> None:
        """Nothing is known of what the graph writes to."""
        for storage in self._storages:
            known.mirrors.drop(storage._cdata)


#: The graph that is being recorded. PyTorch records one at a time.
recording: Recording | None = None


def _flat(out: Any) -> list[Any]:
    return list(out) if isinstance(out, (list, tuple)) else [out]


def follow(known: Known) -> None:
    """Notice the beginning, end and replay of every graph."""
    graph = torch.cuda.CUDAGraph
    begin, end, replay = graph.capture_begin, graph.capture_end, graph.replay

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        global recording
        begin(self, *args, **kwargs)
        recording = _recordings[self] = Recording()

    @functools.wraps(end)
    def capture_end(self: Any) -> None:
        global recording
        recording = None
        end(self)

    @functools.wraps(replay)
    def replayed(self: Any) -> None:
        replay(self)
        if self in _recordings:
            _recordings[self].forget(known)

    graph.capture_begin = capture_begin  # type: ignore[method-assign]
    graph.capture_end = capture_end  # type: ignore[method-assign]
    graph.replay = replayed  # type: ignore[method-assign]


_recordings: weakref.WeakKeyDictionary[Any, Recording] = weakref.WeakKeyDictionary()
