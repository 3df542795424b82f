"""Count live tensor bytes by component, independently of the recorder."""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memtrace import scopes


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operators made and that are still alive.

    Attributes:
        live: bytes by component now.
        peak: the largest sum of all components.
        at_peak: bytes by component at that moment.
        own_peak: the largest value of each component.
    """

    def __init__(self, *existing: torch.nn.Module | torch.Tensor) -> None:
        """``existing`` was allocated before and is not counted."""
        super().__init__()
        self.live: Counter[str] = Counter()
        self.at_peak: Counter[str] = Counter()
        self.own_peak: Counter[str] = Counter()
        self.peak = 0
        self._component = ["other"]
        self._held: dict[int, tuple[str, int]] = {}
        self._existing = {_key(tensor) for tensor in _tensors(existing)}

    def __enter__(self) -> "LiveBytes":
        scopes.attach(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        scopes.attach(None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._born(leaf)
        return result

    def _born(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = _key(tensor)
        if key in self._held or key in self._existing or storage.nbytes() == 0:
            return
        component = self._component[-1]
        self._held[key] = (component, 0)
        self._move(key, component, storage.nbytes())
        weakref.finalize(storage, self._freed, key)
        total = self.live.total()
        if total > self.peak:
            self.peak, self.at_peak = total, self.live.copy()

    def _freed(self, key: int) -> None:
        component, nbytes = self._held.pop(key)
        self.live[component] -= nbytes

    def _move(self, key: int, component: str, nbytes: int) -> None:
        before, held = self._held[key]
        self.live[before] -= held
        self.live[component] += nbytes
        self._held[key] = (component, nbytes)
        self.own_peak[component] = max(self.own_peak[component], self.live[component])

    # What memtrace.scopes calls.

    @contextmanager
    def component(self, component: str) -> Iterator[None]:
        self._component.append(component)
        try:
            yield
        finally:
            self._component.pop()

    @contextmanager
    def scope(self, kind: str, name: str) -> Iterator[None]:
        yield

    @contextmanager
    def request(self, name: str, prompt_tokens: int | None) -> Iterator[scopes.Request]:
        yield scopes.Request()

    def retag(self, tensor: torch.Tensor, component: str) -> None:
        if _key(tensor) in self._held:
            self._move(_key(tensor), component, self._held[_key(tensor)][1])


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(existing: Iterable[torch.nn.Module | torch.Tensor]) -> Iterator[torch.Tensor]:
    for one in existing:
        if isinstance(one, torch.Tensor):
            yield one
        else:
            yield from one.parameters()
            yield from one.buffers()
