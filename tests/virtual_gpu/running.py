"""Runs scripts on virtual GPUs, each in a process of its own.

``benchmarks/gpu_check.py`` has them run on the machine's own GPU instead.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memtrace.trace.reader import ProcessTrace
from memtrace.virtual_gpu.launch import environment

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = SCRIPTS.parents[2]
REAL = os.environ.get("MEMTRACE_TEST_ON") == "real"


def run_on(
    cards: str, script: str, *arguments: object, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run one of our scripts, or the text of one, on virtual cards."""
    virtual = {} if REAL else environment([cards])
    program = [str(SCRIPTS / script)] if script.endswith(".py") else ["-c", script]
    return subprocess.run(
        [sys.executable, *program, *map(str, arguments)],
        cwd=ROOT,  # where scripts find the package tests
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), **virtual, **variables},
    )


def described(process: ProcessTrace) -> list[tuple[Any, ...]]:
    """Every event of a run on any device, but for its time; numbers of contexts and scopes follow
    from when a history was read, so what they stand for is given."""
    contexts, scopes, events = process.contexts, process.scopes, process.events
    paths: list[tuple[tuple[str, str], ...]] = []
    for number, parent in enumerate(scopes["parent"].tolist()):  # the first is the process
        here = (scopes["kind"][number], scopes["name"][number])
        paths.append((*paths[parent], here) if number else ())
    columns = ("action", "device", "stream", "pool", "component", "previous")
    meanings = [
        (*what, paths[scope])
        for *what, scope in zip(
            *(contexts[name] for name in columns), contexts["scope"].tolist(), strict=True
        )
    ]
    columns = ("id", "bytes", "requested", "context")
    return [
        (*numbers, meanings[context])
        for *numbers, context in zip(*(events[name].tolist() for name in columns), strict=True)
    ]


def results(cards: str, script: str, **variables: str) -> Mapping[str, Any]:
    """The JSON document that a script prints last."""
    done = run_on(cards, script, **variables)
    assert done.returncode == 0, done.stderr
    document: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document
