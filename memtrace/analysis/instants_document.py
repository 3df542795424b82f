"""The JSON documents of ``memtrace report --at`` and ``--request``; docs/json.md describes them."""

import dataclasses
from typing import Any

from memtrace.analysis.document import SCHEMA, balance_document, group_document
from memtrace.analysis.instants import Answered, Instant
from memtrace.analysis.stability_document import boundary_document
from memtrace.trace.reader import Trace


def instant_document(trace: Trace, one: Instant, top: int) -> dict[str, Any]:
    """What one device held at an instant."""
    return {
        "schema": SCHEMA,
        "run": str(trace.folder),
        "name": trace.name,
        "pid": one.account.process.pid,
        "device": one.account.device,
        **_instant(one, top),
    }


def request_document(trace: Trace, one: Answered, top: int) -> dict[str, Any]:
    """One request: at its own peak, and right after it."""
    return {
        "schema": SCHEMA,
        "run": str(trace.folder),
        "name": trace.name,
        "pid": one.served.process.pid,
        "device": one.served.device,
        "request": boundary_document(one.boundary),
        "peak": one.peak and _instant(one.peak, top),
        "after": one.after and _instant(one.after, top),
        "snapshot": {
            "compared": one.compared,
            "equal": one.difference is None if one.compared else None,
            "difference": one.difference and one.difference.what,
        },
    }


def _instant(one: Instant, top: int) -> dict[str, Any]:
    return {
        "at": {
            "event": one.balance.event,
            "time_us": one.balance.time_us,
            **dataclasses.asdict(one.place),
        },
        **balance_document(one.balance),
        "top": [group_document(group) for group in one.top[:top]],
    }
