"""What ``memtrace record`` says when the command has ended."""

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from memtrace.record.sampler import Seen
from memtrace.sizes import format_size
from memtrace.trace.manifest import life

#: Manifests of processes by the name of their folder.
Processes = dict[str, dict[str, Any]]

#: States of a process in which a session ran.
_RECORDED = {"recording", "ended"}


def was_recorded(processes: Processes) -> bool:
    """A process with torch was recorded, or none needed to be."""
    states = {process.get("state") for process in processes.values()}
    return bool(states) and ("failed" not in states or not states.isdisjoint(_RECORDED))


def obstacle(unrecorded: Iterable[Seen]) -> str:
    """Why the first Python process couldn't be recorded, or what one needs."""
    found = (seen.reason.text for seen in unrecorded if seen.reason.python and seen.reason.text)
    return next(found, "it needs Python, without -I, -E or -S")


def document(folder: Path, manifest: Mapping[str, Any], processes: Processes) -> dict[str, Any]:
    """What ``--json`` prints; docs/json.md says what each key means."""
    peaks: dict[str, int] = {}
    for name, peak in manifest["process_peak"].items():
        pid = name.partition("-")[0]
        peaks[pid] = max(peak, peaks.get(pid, 0))
    return {
        "schema": 1,
        "run": str(folder),
        "exit": manifest["exit"],
        "death": manifest["death"],
        "recorded": was_recorded(processes),
        "processes": sorted({int(process["pid"]) for process in processes.values()}),
        "unrecorded": manifest["unrecorded"],
        "process_peak": peaks,
    }


def summary(
    shown: Path, processes: Processes, peaks: Mapping[str, int], unrecorded: Iterable[Seen]
) -> str:
    """The closing line of a recording: how many processes are in it and what they took."""
    count = len({life(process) for process in processes.values()})
    what = f"{count} process{'es' if count != 1 else ''} recorded"
    closed = sum(bool(seen.reason.python) for seen in unrecorded)
    if closed:
        what += f", {closed} of Python could not be"
    if peaks:
        what += f", peak RSS {format_size(max(peaks.values()))}"
    if len(peaks) > 1:
        what += " in the largest"
    return f"{what}; see memtrace report {shlex.quote(str(shown))}"
