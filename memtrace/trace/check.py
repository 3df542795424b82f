"""Checks of what a trace says, behind the checksums: a damaged one is refused in one sentence."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from memtrace.components import base
from memtrace.errors import TraceError
from memtrace.trace.manifest import Knowledge
from memtrace.trace.schema import TENSOR_ACTIONS, Action

#: Keys that readers use, with the type of their value; any outer key may be missing or null.
#: A list stands for a list of such values, ``{"*": type}`` for a mapping to them.
RUN: Mapping[str, Any] = {
    "state": str,
    "knowledge": str,
    "command": [str],
    "exit": {"*": (int, type(None))},
    "process_peak": {"*": int},
    "death": {
        "signal": (int, type(None)),
        "name": (str, type(None)),
        "verdict": str,
        "evidence": [str],
    },
    "unrecorded": [{"pid": int, "start_ticks": int, "argv": [str], "reason": (str, type(None))}],
    "sampling": {"nvml": str, "gpus": [{"uuid": str, "total": (int, type(None)), "status": str}]},
    "classified": [{"run": str, "rules": str}],
    "replayed": {"run": str, "settings": str},
    "planned": {
        "engine": str,
        "device": str,
        "allocator": str,
        "modelled": [str],
        "unknown": [str],
    },
    "virtual_gpu": {"devices": [{"total": int, "context": (int, type(None))}]},
    "files": {"*": {"bytes": int, "crc32": int}},
}
PROCESS: Mapping[str, Any] = {
    "pid": int,
    "start_ticks": int,
    "rank": int,
    "cuda": {
        "devices": [
            {
                "ordinal": int,
                "name": (str, type(None)),
                "uuid": (str, type(None)),
                "total_memory": (int, type(None)),
                "memory_fraction": (int, float, type(None)),
            }
        ]
    },
    "argv": [str],
    "state": str,
    "reason": str,
    "failure": str,
    "torch": str,
    "dropped": int,
    "unseen": [str],
    "replayed": str,
    "recorder": {"peak_buffer_bytes": int},
    "values": {
        "unknown_reads": int,
        "places": [{"where": (str, type(None)), "op": str, "count": int}],
        "placeholder": {"token choices": int, "rule": str},
    },
}

_ACTIONS = frozenset(Action)


def check_run(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Refuse a run's manifest whose values have other types than :data:`RUN`, in a TraceError."""
    _check_manifest(folder, manifest, RUN)
    knowledge = manifest.get("knowledge")
    if knowledge is not None and knowledge not in frozenset(Knowledge):
        raise TraceError(f"{folder} is damaged: {knowledge!r} is no way to know a byte")


def check_process(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Refuse a process's manifest without a pid or with other types than :data:`PROCESS`."""
    _check_manifest(folder, manifest, PROCESS)
    if manifest.get("pid") is None:
        raise TraceError(f"{folder} is damaged: its manifest has no pid")


def _check_manifest(folder: Path, manifest: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    for key, kind in kinds.items():
        value = manifest.get(key)
        if value is not None and not _fits(value, kind):
            raise TraceError(f"{folder} is damaged: {key!r} in its manifest has a wrong type")


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(kind, list):
        return isinstance(value, list) and all(_fits(item, kind[0]) for item in value)
    if isinstance(kind, Mapping):
        if not isinstance(value, dict):
            return False
        if "*" in kind:
            return all(_fits(item, kind["*"]) for item in value.values())
        return all(_fits(value.get(key), inner) for key, inner in kind.items())
    return isinstance(value, kind) and not isinstance(value, bool)


def check_scopes(folder: Path, scopes: Mapping[str, Any]) -> None:
    """Refuse scopes that are no tree with its root first.

    Raises:
        TraceError: a parent doesn't stand before its child, a name is missing, or a layer or chunk
            has no number.
    """
    parents = scopes["parent"]
    if len(parents) == 0:
        return
    rows = np.arange(len(parents))
    # Row 0 has the parent -1; every other one an earlier row.
    if not bool(np.all((np.asarray(parents) < rows) & (np.asarray(parents) >= (rows > 0) - 1))):
        raise TraceError(f"{folder} is damaged: its scopes are no tree")
    for kind, name in zip(scopes["kind"], scopes["name"], strict=True):
        if name is None or (kind in ("layer", "chunk") and not name.isdecimal()):
            raise TraceError(f"{folder} is damaged: it has a {kind} named {name!r}")


def check_contexts(folder: Path, contexts: Mapping[str, Any], scopes: int, stacks: int) -> None:
    """Refuse contexts with unknown actions or components, or that name rows that aren't there.

    Raises:
        TraceError: the first such context, by its number.
    """
    columns = ("action", "device", "component", "previous", "scope", "stack")
    # Plain integers: what an enumeration does with NumPy's is slow, and loses a Ctrl-C.
    lists = (np.asarray(contexts[name], dtype=object).tolist() for name in columns)
    for row, values in enumerate(zip(*lists, strict=True)):
        action, device, component, previous, scope, stack = values
        problem = None
        if action not in _ACTIONS:
            problem = f"the unknown action {action}"
        elif not 0 <= scope < scopes or not -1 <= stack < stacks:
            problem = "a scope or stack that isn't there"
        elif action in TENSOR_ACTIONS and (
            device is None or component is None or (action == Action.RETAG and previous is None)
        ):
            problem = "no device or component"
        else:
            for label in (component, previous):
                try:
                    base(label or "other")
                except ValueError:
                    problem = f"the unknown component {label!r}"
        if problem:
            raise TraceError(f"{folder} is damaged: its context {row} has {problem}")
