"""Requests as data frames: sizes as text where they are read, as bytes where they are data."""

from collections.abc import Mapping, Sequence

import pandas as pd

from app.figures.requests import Workload
from app.frames import SUMS, narrow
from memtrace.analysis.compare import TERMS
from memtrace.analysis.growth import Growing
from memtrace.analysis.instants import Answered
from memtrace.analysis.peaks import Balance
from memtrace.analysis.persistence import MEASURES, Persistence
from memtrace.analysis.stability_document import boundary_document
from memtrace.inspected import facts
from memtrace.render import UNKNOWN
from memtrace.render import size as written
from memtrace.sizes import format_size
from memtrace.steadiness import measured


def measures(judged: Persistence) -> pd.DataFrame:
    """How much each kind of memory grows by, a row a kind."""
    known = {one.name: one for one in judged.measures}
    rows = [list(measured(known[name])) if name in known else [UNKNOWN] * 5 for name in MEASURES]
    columns = ["a request", "at least", "at most", "first to last cycle", "verdict"]
    return pd.DataFrame(rows, MEASURES, columns)


def growing(found: Sequence[Growing]) -> pd.DataFrame:
    """What grows, the steepest first."""
    rows = [
        {
            "grows": one.component or "not recorded",
            "a request": format_size(round(one.slope.value)),
            "first": format_size(one.first),
            "last": format_size(one.last),
            "count": f"{one.count:,}",
            "made in": one.where,
            "stack": " < ".join(frame.rpartition("/")[2] for frame in one.stack),
        }
        for one in found
    ]
    frame = pd.DataFrame(rows).set_index("grows")
    return frame if frame["stack"].any() else frame.drop(columns="stack")


def one_request(answered: Mapping[str, Answered]) -> pd.DataFrame:
    """What is known of a request and of each device right after it: a column a run."""
    return pd.DataFrame({name: dict(facts(one)) for name, one in answered.items()}).fillna("")


def terms(answered: Mapping[str, Answered]) -> pd.DataFrame:
    """Both equations at the request's own peak and right after it, of runs with events."""
    columns: dict[str, list[str]] = {}
    for name, one in answered.items():
        for when, found in (("at its peak", one.peak), ("after it", one.after)):
            if found is not None:
                columns[f"{name} {when}"] = _terms(found.balance)
    return narrow(pd.DataFrame(columns, index=[SUMS.get(name, name) for name in TERMS]))


def _terms(balance: Balance) -> list[str]:
    sums = ("live", "allocated", "allocator", "external", "process")
    known = {**balance.components, **{name: getattr(balance, name) for name in sums}}
    return [written(known[name]) for name in TERMS]


def rows(workloads: Sequence[Workload]) -> pd.DataFrame:
    """Every request as data: bytes, microseconds, and seconds where the name ends in ``_s``."""
    return pd.DataFrame(
        {"run": one.name, "counted": number in one.counted, **boundary_document(row)}
        for one in workloads
        for number, row in enumerate(one.rows)
    )


def counted(workloads: Sequence[Workload], measure: str) -> pd.DataFrame:
    """What the cycles are drawn from, in bytes: one row a request that counts."""
    return pd.DataFrame(
        {
            "run": one.name,
            "request": row.name or row.request,
            "prompt tokens": row.prompt_tokens,
            measure: getattr(row, measure),
        }
        for one in workloads
        for row in one.judged.counted
    )
