"""The JSON documents of ``report``, ``compare`` and ``explain``; docs/json.md describes them."""

import dataclasses
from typing import Any

from memtrace.analysis.compare import TERMS, Comparison, Terms, difference
from memtrace.analysis.explanation import Explanation
from memtrace.analysis.failure import Clearing
from memtrace.analysis.oom import Oom
from memtrace.analysis.peaks import Balance, Group
from memtrace.analysis.process import ProcessMemory, Samples
from memtrace.analysis.summary import AccountSummary, ProcessSummary, Summary
from memtrace.analysis.trials import Trials

#: Version of the documents that every ``--json`` prints.
SCHEMA = 1


def document(summary: Summary, top: int) -> dict[str, Any]:
    """One run, with the ``top`` largest allocations; bytes are ints, null is unknown."""
    primary = summary.primary
    torches = [process.torch for process in summary.processes if process.torch]
    return {
        "schema": SCHEMA,
        "run": str(summary.folder),
        "name": summary.name,
        "command": list(summary.command),
        "knowledge": str(summary.knowledge),
        "planned": summary.planned and dataclasses.asdict(summary.planned),
        "state": summary.state,
        "complete": summary.complete,
        "exit": {"code": summary.exit_code, "signal": summary.exit_signal},
        "death": summary.death and dataclasses.asdict(summary.death),
        "oom": _oom(summary.ooms[-1], top) if summary.ooms else None,
        "ooms": len(summary.ooms),
        "torn": dict(summary.torn),
        "rules": list(summary.rules),
        "torch": torches[0] if torches else None,
        "device": primary and primary.device,
        "pid": primary and primary.pid,
        "events": summary.events,
        "dropped": summary.dropped,
        "unseen": sorted({text for process in summary.processes for text in process.unseen}),
        "process": _memory(summary.memory),
        **_account(primary, top),
        "requests": [dataclasses.asdict(request) for request in summary.requests],
        "accounts": [
            {
                "pid": one.pid,
                "folder": one.folder,
                "device": one.device,
                "peak": one.peak.allocated,
            }
            for one in summary.accounts
        ],
        "processes": [_process(process) for process in summary.processes],
        "unrecorded": [dataclasses.asdict(one) for one in summary.unrecorded],
        "sums": {name: dataclasses.asdict(one) for name, one in summary.sums.items()},
    }


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """Several runs: the document of each, and how the others differ from the first, in bytes."""
    first, *others = comparison.sides
    return {
        "schema": SCHEMA,
        "runs": [document(side.summary, top=0) for side in comparison.sides],
        "differences": [
            {
                "run": other.name,
                "baseline": first.name,
                "at_peak": _differences(other.at_peak, first.at_peak),
                "own_peak": _differences(other.own_peak, first.own_peak),
                "above_steady": other.account.above_steady - first.account.above_steady,
            }
            for other in others
        ],
        "verdicts": list(comparison.verdicts),
        "warnings": list(comparison.warnings),
    }


def explanation_document(found: Explanation, top: int) -> dict[str, Any]:
    """What ``memtrace explain RUN`` says, with the ``top`` largest blocks and allocations."""
    oom, parts = found.oom, found.parts
    why = oom.diagnosis if oom else None
    return {
        "schema": SCHEMA,
        "run": str(found.summary.folder),
        "name": found.summary.name,
        "knowledge": str(found.summary.knowledge),
        "pid": found.account.account.process.pid,
        "device": found.account.device,
        "failures": len(found.summary.ooms),
        "at": {
            "event": found.event,
            "time_us": found.time_us,
            **dataclasses.asdict(found.place),
        },
        "verdict": why and str(why.kind),
        "also": [str(kind) for kind in why.also] if why else [],
        "sure": why and why.sure,
        "words": found.words,
        "request": why
        and {
            "bytes": why.request.bytes,
            "segment": why.request.wanted,
            "stream": why.request.owner.stream,
            "pool": why.request.owner.pool,
            "allowed": why.request.allowed,
        },
        "oom": oom and _oom(oom, top),
        "memory": {
            name: getattr(parts, name)
            for name in (
                *("reserved", "allocated", "slack", "pending"),
                *("hard", "releasable", "private", "ratio"),
            )
        },
        "free": [
            {
                "pool": owner.pool,
                "stream": owner.stream,
                "bytes": size,
                "largest_block": parts.largest[owner],
            }
            for owner, size in parts.free.items()
        ],
        "hard_peak": found.hard_peak
        and {
            "bytes": found.hard_peak.bytes,
            "time_us": found.hard_peak.time_us,
            **dataclasses.asdict(found.hard_peak.place),
        },
        "in_the_way": found.clearing and _clearing(found.clearing, top),
        "settings": found.trials and _trials(found.trials),
        "help": list(found.help),
    }


def _clearing(clearing: Clearing, top: int) -> dict[str, Any]:
    return {
        "bytes": clearing.bytes,
        "gained": clearing.gained,
        "segments_returned": clearing.returned,
        "count": len(clearing.blocks),
        "blocks": [
            {
                "address": block.address,
                "bytes": block.bytes,
                "requested": block.requested,
                "component": block.component,
                "age_us": block.age_us,
                "pending": block.pending,
                **dataclasses.asdict(block.place),
                "stack": list(block.stack),
            }
            for block in clearing.blocks[:top]
        ],
    }


def _trials(trials: Trials) -> dict[str, Any]:
    return {
        "own": dataclasses.asdict(trials.own),
        "others": [dataclasses.asdict(trial) for trial in trials.others],
        "distrust": trials.distrust,
    }


def _differences(terms: Terms, baseline: Terms) -> dict[str, int | None]:
    return {name: difference(terms[name], baseline[name]) for name in TERMS}


def _account(one: AccountSummary | None, top: int) -> dict[str, Any]:
    if one is None:
        keys = (
            *("peak", "own_peak", "live_peak", "end", "above_steady", "identities", "beside"),
            *("device_name", "reserved_peak", "headroom"),
        )
        return dict.fromkeys(keys) | {"top": []}
    return {
        "peak": {
            "at": {
                "event": one.peak.event,
                "time_us": one.peak.time_us,
                **dataclasses.asdict(one.place),
            },
            **balance_document(one.peak),
            "external_parts": one.external and dataclasses.asdict(one.external),
        },
        "own_peak": dict(one.own_peaks) | dict(one.details),
        "live_peak": one.live_peak,
        "device_name": one.device_name,
        "reserved_peak": one.reserved_peak,
        "headroom": one.headroom,
        "end": balance_document(one.end),
        "above_steady": one.above_steady,
        "identities": {
            "hold": one.identities.hold,
            "events": one.identities.events,
            "problem": one.identities.problem,
        },
        "beside": {
            **{name: _samples(found, one.peak) for name, found in one.beside.items()},
            "device_total": one.device_total,
        },
        "top": [group_document(group) for group in one.top[:top]],
    }


def balance_document(balance: Balance) -> dict[str, Any]:
    """Every term of both equations."""
    return {
        "allocated": balance.allocated,
        "live": balance.live,
        "components": dict(balance.components),
        "details": dict(balance.details),
        "allocator": balance.allocator,
        "external": balance.external,
        "process": balance.process,
    }


def _samples(found: Samples, at: Balance) -> dict[str, int | None]:
    return {"at_peak": found.at(at.time_us), "peak": found.peak}


def group_document(group: Group) -> dict[str, Any]:
    """Storages that are alike."""
    return {
        "component": group.component,
        "phase": group.place.phase,
        "module": group.place.module,
        "op": group.place.op,
        "layers": list(group.layers),
        "count": group.count,
        "bytes": group.bytes,
        "stack": list(group.stack),
    }


def _memory(memory: ProcessMemory | None) -> dict[str, Any]:
    if memory is None or memory.peak is None:
        missing = memory and memory.missing
        return {"peak": None, "source": None, "exact": False, "missing": missing}
    exact = memory.high_water is not None
    return {"peak": memory.peak, "source": memory.source, "exact": exact, "missing": None}


def _process(process: ProcessSummary) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "folder": process.folder,
        "rank": process.rank,
        "argv": list(process.argv),
        "state": process.state,
        "reason": process.reason,
        "torch": process.torch,
        "events": process.events,
        "dropped": process.dropped,
        "recorder_buffers": process.buffers,
        "rss_peak": process.memory.peak,
        "values": process.values and dataclasses.asdict(process.values),
    }


def _oom(oom: Oom, top: int) -> dict[str, Any]:
    return {
        "pid": oom.pid,
        "device": oom.device,
        "at": {"event": oom.event, "time_us": oom.time_us, **dataclasses.asdict(oom.place)},
        "requested": oom.requested,
        "free": oom.free,
        "total": oom.total,
        "reserved": oom.reserved,
        "allocated": oom.allocated,
        "active": oom.active,
        "inactive_split": oom.inactive_split,
        "largest_free_block": oom.largest_free_block,
        "outside": oom.outside,
        "components": dict(oom.components),
        "top": [group_document(group) for group in oom.top[:top]],
        "kind": str(oom.kind),
        "verdict": oom.verdict,
    }
