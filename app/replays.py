"""Runs that readers made by replaying others (:mod:`app.replaying`)."""

import json
import sys
from collections.abc import Hashable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from app.load import Subject
from app.making import Making, everything, place
from memtrace.allocator.simulation import Outcome
from memtrace.analysis.what_if import Change


@dataclass
class Replay(Making):
    """Of which subject and run, and what is changed.

    Attributes:
        key: the subject's.
        source: its run.
        events: how many there are.
        outcome: what came of it, once it is made.
        notes: what it takes for granted.
    """

    key: Hashable = None
    source: Path = Path()
    change: Change = field(default_factory=Change)
    events: int = 0
    outcome: Outcome | None = None
    notes: list[str] = field(default_factory=list)

    def heard(self, line: str) -> None:
        said = json.loads(line)
        if "done" in said:
            self.share = min(said["done"] / max(self.events, 1), 1.0)
        else:
            self.notes = said["notes"]
            self.outcome = Outcome(**said["outcome"])

    def finish(self, rest: str) -> None:
        """All was told."""

    def complaint(self, rest: str) -> str:
        return (rest.splitlines() or [""])[-1]


def of(subject: Subject) -> list[Replay]:
    """Those of one subject, and those under way."""
    return [one for one in everything() if isinstance(one, Replay) and one.key == subject.key]


def replay(subject: Subject, change: Change) -> Replay:
    """Make a run of ``subject`` under ``change``, unless it is there already or under way."""
    for known in of(subject):
        if known.change == change:
            return known
    account, source = subject.account.account, subject.summary.folder
    name = f"{subject.name}, {change}"
    made = Replay(
        name,
        place(name),
        key=subject.key,
        source=source,
        change=change,
        events=len(account.process.events["id"]),
    )
    order = {
        "run": str(source),
        "process": account.process.folder.name,
        "device": account.device,
        "change": asdict(change),
        "out": str(made.folder),
    }
    made.start([sys.executable, "-P", "-m", "app.replaying", json.dumps(order)])
    return made
