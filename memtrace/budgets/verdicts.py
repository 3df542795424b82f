"""What was measured against what was allowed, and a breach in words."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memtrace.analysis.blocks import Block
from memtrace.analysis.peaks import Group
from memtrace.budgets.store import Values
from memtrace.budgets.words import Limit
from memtrace.errors import MemtraceError
from memtrace.sizes import format_size

#: Allocations listed, and frames of each.
_TOP, _FRAMES = 8, 3

_WORKSPACES = (
    "backend holds workspaces that kernels keep from their first use on (cuBLAS: 8 to 32 MiB); "
    "warmup=1 leaves a first use out"
)


@dataclass(frozen=True)
class Verdict:
    """One limit on one device."""

    limit: Limit
    device: str
    allowed: int
    measured: int
    row: int | None  # of the block, where it was reached
    where: str

    @property
    def excess(self) -> int:
        """Bytes above what is allowed; being exactly at a limit is within it."""
        return self.measured - self.allowed

    @property
    def over(self) -> bool:
        return self.excess > 0

    def __str__(self) -> str:
        """The numbers in one line."""
        return (
            f"{self.limit.name} {format_size(self.measured)} > {format_size(self.allowed)} "
            f"({format_size(self.excess, signed=True)})"
        )


@dataclass
class Finding:
    """What a test, or a ``with`` block of it, was found to take; plain values, fit for JSON."""

    label: str | None  # of a block; None: the test
    devices: Values = field(default_factory=dict)
    limits: list[dict[str, Any]] = field(default_factory=list)
    plateau: list[dict[str, Any]] = field(default_factory=list)
    over: list[str] = field(default_factory=list)  # breaches in one line each
    problem: str | None = None  # why it can't be judged
    text: str = ""  # all about the breaches, or the problem
    top: list[dict[str, Any]] = field(default_factory=list)
    trace: str | None = None  # the run that is kept

    @property
    def good(self) -> bool:
        return not self.over and self.problem is None

    def kept(self, run: Path, start: Path) -> "Finding":
        """The same, with the run that shows more, named as from the folder ``start``."""
        self.trace = str(run)
        shown = run.relative_to(start) if run.is_relative_to(start) else run
        self.text += f"\n\nmore of it: memtrace report {shlex.quote(str(shown))}"
        return self


def judge(
    limits: Sequence[Limit],
    blocks: Sequence[Block],
    phases: set[str],
    reference: Callable[[Limit], Values],
) -> list[Verdict]:
    """Every limit on every device.

    Args:
        limits: what is allowed.
        blocks: what was added, one a device.
        phases: those that happened.
        reference: what a relative limit is relative to.

    Raises:
        MemtraceError: a limit can't be judged: its phase never happened, or its baseline isn't
            known.
    """
    found = []
    for limit in limits:
        if limit.phase is not None and limit.phase not in phases:
            there = f"there were {', '.join(sorted(phases))}" if phases else "there was none"
            raise MemtraceError(f"phase {limit.phase!r} never happened; {there}")
        whole = {} if limit.size.of is None else reference(limit)
        for block in blocks:
            measure = block.measure(limit.metric, limit.phase)
            found.append(
                Verdict(
                    limit=limit,
                    device=block.device,
                    allowed=limit.allowed(whole.get(block.device, {}).get(limit.metric, 0)),
                    measured=measure.bytes,
                    row=measure.row,
                    where="" if measure.row is None else str(block.place(measure.row)),
                )
            )
    return found


def finding(
    label: str | None,
    blocks: Sequence[Block],
    verdicts: Sequence[Verdict],
    root: Path,
    card: str | None,
) -> Finding:
    """All of it.

    Args:
        root: the folder whose frames are the user's.
        card: the cards that the blocks' devices stand for; None: they are there.
    """
    one = Finding(
        label=label,
        devices={block.device: dict(block.values) for block in blocks},
        limits=[
            {
                "metric": verdict.limit.metric,
                "phase": verdict.limit.phase,
                "scope": verdict.limit.scope,
                "device": verdict.device,
                "limit": str(verdict.limit.size),
                "tolerance": str(verdict.limit.tolerance),
                "allowed": verdict.allowed,
                "measured": verdict.measured,
                "excess": max(0, verdict.excess),
                "at": verdict.where or None,
            }
            for verdict in verdicts
        ],
    )
    several = len(blocks) > 1
    parts = []
    for block in blocks:
        here = [verdict for verdict in verdicts if verdict.device == block.device]
        over = [verdict for verdict in here if verdict.over]
        if over:
            one.over += [f"{one}{f' on {block.device}' if several else ''}" for one in over]
            row, instant = _instant(block, over[0])
            top = [] if row is None else _foremost(block.top(row), over[0].limit.metric)[:_TOP]
            one.top += [_document(block.device, group) for group in top]
            device = block.device if card is None else f"{block.device} ({card}, planned)"
            parts.append(_explain(block, device, here, row, instant, top, root))
    one.text = "\n\n".join(parts)
    return one


def _foremost(groups: Sequence[Group], metric: str) -> list[Group]:
    """Those of the component that is over first, if it is one."""
    return sorted(groups, key=lambda group: group.component.partition("/")[0] != metric)


def _instant(block: Block, verdict: Verdict) -> tuple[int | None, str]:
    """The row that shows most about a breach, and what it is."""
    metric = verdict.limit.metric
    if metric == "end":
        return block.last, "at the end"
    peak = block.measure("peak" if metric == "total" else metric, verdict.limit.phase)
    return peak.row, "at the peak" + ("" if metric in ("peak", "total") else f" of {metric}")


def _explain(
    block: Block,
    device: str,
    verdicts: Sequence[Verdict],
    row: int | None,
    instant: str,
    top: Sequence[Group],
    root: Path,
) -> str:
    where = "" if row is None or instant == "at the end" else f" {block.place(row).within}"
    lines = [
        f"memory on {device}, beyond what was there before",
        "",
        *_budgets(verdicts),
        "",
        f"{instant}{where}:",
        f"{'component':<12}{'then':>14}{'own peak':>14}",
    ]
    then = block.components(row)
    for name, size in {"all": sum(then.values()), **then}.items():
        peak = block.values["peak" if name == "all" else name]
        if size or peak:
            lines.append(f"{name:<12}{format_size(size):>14}{format_size(peak):>14}")
    if then["backend"] > 0:
        lines.append(_WORKSPACES)
    if top:
        lines += ["", "largest allocations then:", *allocations(top, root)]
    return "\n".join(lines)


def _budgets(verdicts: Sequence[Verdict]) -> list[str]:
    """Every limit as a row of a table, with where it was exceeded."""
    names = [verdict.limit.name for verdict in verdicts]
    width = max(12, 2 + max(map(len, names)))
    lines = [f"{'budget':<{width}}{'limit':>14}{'measured':>14}{'excess':>14}"]
    for name, verdict in zip(names, verdicts, strict=True):
        excess = format_size(verdict.excess, signed=True) if verdict.over else "within"
        row = f"{name:<{width}}{format_size(verdict.allowed):>14}"
        row += f"{format_size(verdict.measured):>14}{excess:>14}"
        details = []
        if verdict.limit.size.percent is not None:
            details.append(f"{verdict.limit.size}")
        if verdict.limit.tolerance.bytes or verdict.limit.tolerance.percent:
            details.append(f"{verdict.limit.tolerance} tolerated")
        lines.append(row + (f"  ({', '.join(details)})" if details else ""))
        if verdict.over and verdict.where:
            lines.append(f"  {verdict.where}")
    return lines


def allocations(groups: Sequence[Group], root: Path) -> list[str]:
    """Groups of storages in lines, each with the user's frames that made it."""
    lines = []
    for group in groups:
        lines.append(
            f"{format_size(group.bytes):>12}  {group.component:<14}{group.count:>5} ×  "
            f"{group.where}"
        )
        lines += [f"{'':>36}{frame}" for frame in user_frames(group.stack, root)]
    return lines


def user_frames(stack: Sequence[str], root: Path) -> list[str]:
    """The innermost frames of files below ``root`` that aren't installed there, else of any."""
    prefix = f"{root}/"
    own = [
        frame.removeprefix(prefix)
        for frame in stack
        if frame.startswith(prefix) and "/site-packages/" not in frame
    ]
    return own[:_FRAMES] or list(stack[:1])


def _document(device: str, group: Group) -> dict[str, Any]:
    return {
        "device": device,
        "component": group.component,
        "bytes": group.bytes,
        "count": group.count,
        "where": group.where,
        "stack": list(group.stack),
    }
