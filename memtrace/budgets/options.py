"""What the command line and the configuration say, resolved once.

Each option has a twin in the configuration, of the same name; what the command line says wins.
"""

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from memtrace.budgets.store import Values, load, saved_path
from memtrace.budgets.words import Budget, Limit, parse_default, parse_regression
from memtrace.errors import MemtraceError


@dataclass(frozen=True)
class Options:
    """What holds for a whole session."""

    default: Budget | None  # of every test
    traces: Path  # where runs of tests over budget are kept
    stacks: int  # frames
    json: Path | None
    storage: Path
    save: Path | None
    compared: str | None  # name of the saved measurements
    saved: Mapping[str, Values] = field(default_factory=dict)
    regressions: Sequence[Limit] = ()

    @property
    def report(self) -> bool:
        """Whether there is something to write or to compare at the end."""
        return bool(self.json or self.save or self.compared)

    def saved_for(self, nodeid: str, label: str | None) -> Values:
        """What was saved of a test or a block of it; empty: nothing."""
        return self.saved.get(key(nodeid, label), {})

    def regressions_for(self, nodeid: str, label: str | None) -> Sequence[Limit]:
        """Limits by what was saved; none for what is new."""
        return self.regressions if self.saved_for(nodeid, label) else ()


def key(nodeid: str, label: str | None) -> str:
    """What a test, or a block of it, is saved by."""
    return nodeid if label is None else f"{nodeid} {label}"


def read_options(config: pytest.Config) -> Options:
    """Everything that is configured.

    Raises:
        MemtraceError: something can't be.
    """
    root = config.rootpath
    storage = root / _text(config, "memory_storage", ".memory_budgets")
    compared = _text(config, "memory_compare") or None
    fails = config.getoption("memory_compare_fail") or config.getini("memory_compare_fail")
    if fails and compared is None:
        raise MemtraceError("--memory-compare-fail needs --memory-compare NAME")
    save = _text(config, "memory_save")
    json = _text(config, "memory_json")
    stacks = _text(config, "memory_stacks", "8")
    if not stacks.isdecimal():
        raise MemtraceError(f"--memory-stacks {stacks}: write a number of frames, 0 for none")
    return Options(
        default=parse_default(config.getini("memory_budget")),
        traces=_traces(config),
        stacks=int(stacks),
        json=root / json if json else None,
        storage=storage,
        save=saved_path(storage, save) if save else None,
        compared=compared,
        saved=load(saved_path(storage, compared)) if compared else {},
        regressions=[parse_regression(text, compared or "") for text in fails],
    )


def _text(config: pytest.Config, name: str, default: str = "") -> str:
    """An option or its twin; the command line's None means that it says nothing."""
    value = config.getoption(name)
    return str(value if value is not None else config.getini(name) or default)


def _traces(config: pytest.Config) -> Path:
    folder = _text(config, "memory_traces")
    if folder:
        return config.rootpath / folder
    cache = getattr(config, "cache", None)  # absent with -p no:cacheprovider
    if cache is not None:
        with suppress(OSError):  # it can't be written
            return Path(cache.mkdir("memory"))
    return Path(tempfile.gettempdir()) / f"memtrace-budgets-{os.getuid()}"
