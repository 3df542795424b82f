"""The JSON document of ``memtrace stability``; docs/json.md describes it."""

import dataclasses
from collections.abc import Sequence
from math import isfinite
from typing import Any

from memtrace.analysis.boundaries import Boundary
from memtrace.analysis.document import SCHEMA
from memtrace.analysis.persistence import Persistence
from memtrace.analysis.stability import Slope
from memtrace.trace.reader import Trace


def stability_document(trace: Trace, found: Sequence[Persistence], top: int) -> dict[str, Any]:
    """The verdicts on a run's processes; bytes are ints, slopes bytes a request, null unknown."""
    return {
        "schema": SCHEMA,
        "run": str(trace.folder),
        "name": trace.name,
        "processes": [_process(one, top) for one in found],
    }


def _process(one: Persistence, top: int) -> dict[str, Any]:
    return {
        "pid": one.served.process.pid,
        "device": one.served.device,
        "verdict": str(one.verdict),
        "cause": one.cause and one.cause.name,
        "limit": one.limit,
        "wanting": one.wanting,
        "requests": len(one.served.boundaries),
        "answered": one.answered,
        "warmup": one.warmup,
        "counted": len(one.counted),
        "by_prompt_length": one.grouped,
        "measures": {
            measure.name: {
                **dataclasses.asdict(measure),
                "slope": measure.slope.value,
                "interval": interval(measure.slope),
                "verdict": str(measure.verdict),
                "since": one.counted[measure.since].request,
            }
            for measure in one.measures
        },
        "inactive_split": one.highest("inactive_split"),
        "inactive_split_peak": one.counted[-1].inactive_split_peak if one.counted else None,
        "retries": one.gained("retries"),
        "ooms": one.gained("ooms"),
        "growing": [
            {
                "component": row.component,
                "where": row.where,
                "stack": list(row.stack),
                "slope": row.slope.value,
                "interval": interval(row.slope),
                "first": row.first,
                "last": row.last,
                "count": row.count,
            }
            for row in one.growing[:top]
        ],
        "boundaries": [boundary_document(row) for row in one.served.boundaries],
    }


def interval(found: Slope) -> list[float | None]:
    """Its ends; null: there are too few points for one."""
    return [value if isfinite(value) else None for value in (found.low, found.high)]


def boundary_document(one: Boundary) -> dict[str, Any]:
    """One request and its device right after it."""
    return {
        **dataclasses.asdict(one),
        "first_token_s": one.first_token_s,
        "tokens_per_s": one.tokens_per_s,
    }
