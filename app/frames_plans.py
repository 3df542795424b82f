"""Plans as data frames: sizes as text where read, as bytes where data."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from app.figures.capacity import Curve
from memtrace.sizes import format_size


def outcomes(documents: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """A row a planned run: ``tidekv plan --json`` of each, by what the run is called."""
    columns = ["run", "prompt", "card", "fits", "allocated at most", "reserved at most", "left"]
    return pd.DataFrame(
        [(name, *_row(one)) for name, one in documents.items()], columns=columns
    ).set_index("run")


def _row(found: Mapping[str, Any]) -> tuple[str, ...]:
    peak = (found.get("peak") or {}).get("allocated")
    return (
        f"{found['prompt_tokens']:,}",
        found["card"],
        "yes" if found["fits"] else "no",
        "unknown" if peak is None else format_size(peak),
        "unknown" if found["reserved"]["peak"] is None else format_size(found["reserved"]["peak"]),
        "none" if found["headroom"] is None else format_size(found["headroom"]),
    )


def peaks(curves: Sequence[Curve]) -> pd.DataFrame:
    """A row a prompt length, two columns a method."""
    prompts = sorted({probe["prompt"] for one in curves for probe in one.probes})
    columns = {}
    for one in curves:
        by_prompt = {probe["prompt"]: probe for probe in one.probes}
        for name in ("allocated", "reserved"):
            columns[f"{one.method}, {name}"] = [
                _peak(by_prompt.get(prompt), name) for prompt in prompts
            ]
    return pd.DataFrame(columns, index=pd.Index([f"{one:,}" for one in prompts], name="prompt"))


def _peak(probe: Mapping[str, Any] | None, name: str) -> str:
    if probe is None:
        return "not tried"
    return format_size(probe[f"{name}_peak"]) if probe["fits"] else "doesn't fit"


def points(curves: Sequence[Curve]) -> pd.DataFrame:
    """What the capacity curve draws, in bytes, and what doesn't fit: a row a prompt."""
    rows = [
        (one.method, one.card, *(probe[name] for name in ("prompt", "fits")), *_bytes(probe))
        for one in curves
        for probe in one.probes
    ]
    columns = ["method", "card", "prompt", "fits", "allocated", "reserved"]
    return pd.DataFrame(rows, columns=columns)


def _bytes(probe: Mapping[str, Any]) -> tuple[int, int]:
    return probe["allocated_peak"], probe["reserved_peak"]
