"""Run a command for a card that isn't there: an ordinary trace, marked as planned.

The engine ``virtual`` is the virtual GPU (docs/virtual_gpu.md): the command's own PyTorch with its
dispatcher, its caching allocator and its out-of-memory path. The engine ``fake`` is the fake GPU
(docs/fake_gpu.md), for a PyTorch without CUDA: tensors without data, and our own allocator. An
ending for lack of memory is a result like another: the trace holds it, and what stood in the way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memtrace import fake_gpu
from memtrace.allocator.settings import Settings, environment_of, parse_version
from memtrace.devices import Device, choose
from memtrace.errors import MemtraceError
from memtrace.fake_gpu.launch import prepare as prepare_fake
from memtrace.record.launcher import record
from memtrace.sizes import format_size
from memtrace.trace.manifest import Knowledge, read_manifest, write_manifest
from memtrace.virtual_gpu import UNFOLLOWED
from memtrace.virtual_gpu.launch import VirtualGpu, prepare
from memtrace.virtual_gpu.torches import version_of

if TYPE_CHECKING:
    from memtrace.trace.reader import Trace

#: ``auto``: virtual where it runs, else fake.
ENGINES = ("auto", "virtual", "fake")

#: What a plan of each engine rests on.
_MODELLED = {
    "virtual": (
        "tensors, allocator and workspaces: the host code of PyTorch, on made-up addresses",
    ),
    "fake": (
        "tensors: what PyTorch's rules for meta tensors say that operators return",
        "allocator: our simulation of PyTorch's",
        "workspaces and scratch memory of kernels: a table of operators",
    ),
}


def dry_run(
    command: Sequence[str],
    *,
    device: str,
    out: Path | str,
    engine: str = "auto",
    allocator: str = "",
    source: str = "auto",
    stacks: int = 0,
    variables: Mapping[str, str] | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    follow_values: bool = True,
) -> "Trace":
    """Run ``command`` to its end as if on ``device`` and return what it took.

    Its exit code is ``trace.manifest["exit"]``.

    Args:
        command: program and arguments; the engine virtual needs PyTorch's build for CUDA.
        device: cards of ``memtrace devices``, such as ``a100-40g`` or ``2×h100-80g``; or ``cpu``,
            whose tensors alone are planned.
        out: folder to make.
        engine: one of :data:`ENGINES`.
        allocator: ``PYTORCH_CUDA_ALLOC_CONF``; empty: PyTorch's defaults, whatever the environment
            says.
        source: what a :class:`~memtrace.record.session.Session` takes by that name.
        stacks: Python frames kept for each allocation.
        variables: what to add to the command's environment.
        stdout, stderr: file descriptors for what the command prints; None: ours.
        follow_values: False: take :data:`~memtrace.virtual_gpu.READ_UNFOLLOWED` for an exit code if
            the command reads a value that the host could know, and be several times as fast. The
            trace is the same where it reads none, and of no use where it does.

    Raises:
        MemtraceError: no such engine, card or setting, the command can't be started, or ``out``
            not be made or written.
    """
    out = Path(out)
    if engine not in ENGINES:
        raise MemtraceError(f"there is no engine {engine!r}; use one of {', '.join(ENGINES)}")
    cards = [] if device == "cpu" else choose(device)
    if device == "cpu" and (allocator or engine == "virtual"):
        raise MemtraceError("the CPU is planned by the engine fake, and has no allocator settings")
    settings = Settings()
    if allocator:
        settings = Settings.parse(allocator, parse_version(version_of(command)))
    gpu = _prepared(engine, cards, command)
    fake = gpu.knowledge is Knowledge.MODELLED
    if fake and settings.backend != "native":
        raise MemtraceError(
            f"the engine fake doesn't model the allocator {settings.backend}, whose memory the "
            "driver manages; use the engine virtual"
        )
    added = {**(variables or {}), **gpu.variables, **environment_of(allocator)}
    added |= {UNFOLLOWED: "" if follow_values else "1"}
    record(
        command,
        out,
        quiet=True,
        source=source if cards else "tensors",
        stacks=stacks,
        virtual_gpu=replace(gpu, variables=added),
        notes={"planned": _planned(gpu, device, cards, allocator)},
        stdout=stdout,
        stderr=stderr,
    )
    from memtrace.trace.reader import open_trace  # not before the command runs: numpy, pyarrow

    trace = open_trace(out)
    if not trace.complete or any("failure" in one.manifest for one in trace.processes):
        raise MemtraceError(f"{out} couldn't be written in full, so what was planned isn't known")
    return _unmodelled_named(trace, out) if fake else trace


def _prepared(engine: str, cards: Sequence[Device], command: Sequence[str]) -> VirtualGpu:
    if engine == "fake" or not cards:
        return prepare_fake(cards)
    try:
        return prepare(cards, command)
    except MemtraceError:
        if engine == "virtual":
            raise
        return prepare_fake(cards)


def _planned(
    gpu: VirtualGpu, device: str, cards: Sequence[Device], allocator: str
) -> dict[str, Any]:
    """What the manifest of a planned run says: what it rests on, and what it can't know."""
    engine = "fake" if gpu.knowledge is Knowledge.MODELLED else "virtual"
    modelled = list(_MODELLED[engine] if cards else _MODELLED["fake"][:1])
    unknown = ["time: nothing is computed", "memory of libraries, driver and other processes"]
    for card in dict.fromkeys(cards):
        if card.context is None:
            unknown.append(f"CUDA context of {card.name}")
        else:
            source = card.sources.get("context", "the catalogue")
            modelled.append(f"CUDA context of {card.name}: {format_size(card.context)}, {source}")
    return {
        "engine": engine,
        "device": device,
        "allocator": allocator,
        "modelled": modelled,
        "unknown": unknown,
    }


def _unmodelled_named(trace: "Trace", run: Path) -> "Trace":
    """Say in a run's manifest which operators' scratch memory its processes couldn't know."""
    processes = [process.manifest for process in trace.processes]
    met = {one for manifest in processes for one in manifest.get(fake_gpu.UNMODELLED) or ()}
    if not met:
        return trace
    unknown = trace.manifest["planned"]["unknown"]
    return amend(run, unknown=[*unknown, f"scratch memory of {', '.join(sorted(met))}"])


def amend(run: Path, **planned: Any) -> "Trace":
    """Change what the manifest of a planned run says of the plan; the run as it is then."""
    from memtrace.trace.reader import open_trace

    manifest = read_manifest(run)
    manifest = {name: one for name, one in manifest.items() if name not in ("format", "schema")}
    write_manifest(run, manifest | {"planned": manifest["planned"] | planned})
    return open_trace(run)
