"""memtrace: where each byte of a PyTorch program goes.

PYTEST_DONT_REWRITE: a recorded pytest has imported this package before its plugins are set up, and
would warn that it can't rewrite our asserts.
"""

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without importing typing
if TYPE_CHECKING:
    from typing import Any

    from memtrace.dryrun import dry_run
    from memtrace.record.here import record_here

__all__ = ["dry_run", "record_here"]
__version__ = "0.1.0"

_HOMES = {"dry_run": "dryrun", "record_here": "record.here"}


def __getattr__(name: str) -> "Any":
    """Import on first use: a script that says its scopes must not wait for the recorder."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"memtrace.{_HOMES[name]}"), name)
