"""Process memory beside the books: whose it is, what it is made of, and why it may be unknown."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace.analysis.document import document
from memtrace.analysis.process import process_memory
from memtrace.analysis.summary import AccountSummary, Summary, summarise
from memtrace.render import report, to_text
from memtrace.trace.manifest import file_checksums, write_manifest
from memtrace.trace.reader import open_trace
from memtrace.trace.schema import Action
from memtrace.trace.writer import TableWriter
from tests.synthetic import PID, History

MIB = 1 << 20
CONTEXT = 400 * MIB
#: As PyTorch says it and as NVML does.
OWN, UUID = "aaaaaaaa-1", "GPU-AAAAAAAA-1"
SOURCES = ("time_us", "pid", "source", "event", "value")
#: One reading of NVML each 100 ms; the allocator takes 64 MiB at 250 ms and 32 MiB at 450 ms.
READINGS = [
    (100_000, CONTEXT - 5 * MIB),
    (200_000, CONTEXT),
    (300_000, CONTEXT + 66 * MIB),
    (400_000, CONTEXT + 67 * MIB),
]


def on_gpu() -> History:
    """A process that takes two segments and allocates from them."""
    history = History()
    for number, (time_us, size) in enumerate([(250_000, 64 * MIB), (450_000, 32 * MIB)]):
        history.event(Action.SEGMENT_ALLOC, number << 30, size, None, device="cuda:0")
        history.event(Action.ALLOC, number << 30, size // 2, "Act", device="cuda:0")
        for row in (-2, -1):
            _, *rest = history.rows["events"][row]
            history.rows["events"][row] = (time_us, *rest)
    return history


def write(
    folder: Path,
    rows: list[tuple[int, int | None, str, int]],
    *,
    gpus: dict[str, str] | None = None,
    cuda: dict[str, Any] | None = None,
    **manifest: Any,
) -> Summary:
    """A run with what a launcher sampled from outside: (time, process, source, value)."""
    on_gpu().write(folder, complete=False, process={"cuda": cuda} if cuda else {})
    with TableWriter(folder) as writer:
        if rows:
            columns = zip(*[(t, p, s, None, v) for t, p, s, v in rows], strict=True)
            writer.append("samples", dict(zip(SOURCES, columns, strict=True)))
    sampling = {
        "nvml": "not available: Driver Not Loaded",
        "gpus": [
            {"uuid": uuid, "status": status, "total": 80 << 30}
            for uuid, status in (gpus or {}).items()
        ],
    }
    write_manifest(
        folder,
        {
            "state": "complete",
            "knowledge": "measured",
            "exit": {"code": 0, "signal": None},
            "sampling": sampling,
            "files": file_checksums(folder),
            **manifest,
        },
    )
    return summarise(open_trace(folder))


def primary(summary: Summary) -> AccountSummary:
    one = summary.primary
    assert one is not None
    assert one.identities.hold, one.identities.problem
    return one


CUDA = {"devices": [{"ordinal": 0, "uuid": OWN, "name": "A100", "total_memory": 80 << 30}]}
BY_PROCESS = [(time_us, PID, f"nvml:{UUID}", value) for time_us, value in READINGS]


def test_external_is_split_into_what_was_there_before_and_what_came(tmp_path: Path) -> None:
    one = primary(write(tmp_path / "run", BY_PROCESS, gpus={UUID: "by process"}, cuda=CUDA))
    assert (one.peak.allocated, one.peak.process) == (48 * MIB, CONTEXT + 67 * MIB)
    parts = one.external
    assert parts is not None
    # the last reading before the first segment, not the one while the context was being made
    assert parts.base == CONTEXT
    assert parts.growth == 3 * MIB
    # 32 MiB were taken after the last reading
    assert parts.residual == -32 * MIB
    assert parts.apart_us == 50_000
    assert parts.base + parts.growth + parts.residual == one.peak.external


def test_without_a_reading_before_the_first_segment_the_first_one_counts(tmp_path: Path) -> None:
    one = primary(write(tmp_path / "run", BY_PROCESS[2:], gpus={UUID: "by process"}, cuda=CUDA))
    assert one.external is not None
    assert (one.external.base, one.external.growth) == (CONTEXT + 2 * MIB, MIB)


def test_the_report_closes_the_second_equation(tmp_path: Path) -> None:
    rows = [
        *BY_PROCESS,
        (440_000, None, f"nvml-used:{UUID}", 9000 * MIB),
        (440_000, None, f"nvml-others:{UUID}", 8533 * MIB),
        (440_000, PID, "pinned", 16 * MIB),
    ]
    summary = write(tmp_path / "run", rows, gpus={UUID: "by process"}, cuda=CUDA)
    text = to_text(report(summary, top=0))
    rows_by_name = {line.replace("■", "").split()[0]: line for line in text.splitlines() if line}
    for name, value, note in (
        ("external", "371.0 MiB", "process - reserved"),
        ("base", "400.0 MiB", "before the first tensor"),
        ("growth", "3.0 MiB", "since then"),
        ("residual", "-32.0 MiB", "50 ms between"),
        ("process", "467.0 MiB", "(2) NVML, sampled"),
        ("others", "8.33 GiB", "other processes"),
        ("device", "8.79 GiB", "of 80.00 GiB"),
        ("pinned", "16.0 MiB", "in the host's memory"),
    ):
        assert value in rows_by_name[name], text
        assert note in rows_by_name[name], text
    assert max(map(len, text.splitlines())) <= 80
    found = document(summary, top=0)
    assert found["peak"]["external_parts"]["residual"] == -32 * MIB
    assert found["beside"] == {
        "others": {"at_peak": 8533 * MIB, "peak": 8533 * MIB},
        "used": {"at_peak": 9000 * MIB, "peak": 9000 * MIB},
        "pinned": {"at_peak": 16 * MIB, "peak": 16 * MIB},
        "device_total": 80 << 30,
    }


@pytest.mark.parametrize(
    ("gpus", "cuda", "knowledge", "missing"),
    [
        pytest.param({}, None, "measured", "not available: Driver Not Loaded", id="no driver"),
        pytest.param(
            {"GPU-a": "by process", "GPU-b": "by process"},
            None,
            "measured",
            "it isn't known which of the machine's 2 GPUs cuda:0 is",
            id="several and no UUID",
        ),
        pytest.param(
            {"MIG-x": "by process"},
            CUDA,
            "measured",
            f"NVML doesn't list cuda:0 ({OWN}) or lists its parts (MIG) only",
            id="divided",
        ),
        pytest.param(
            {UUID: "not available: the driver doesn't report memory by process"},
            CUDA,
            "measured",
            "not available: the driver doesn't report memory by process",
            id="WDDM",
        ),
        pytest.param(
            {UUID: "by process"},
            CUDA,
            "virtual",
            "the GPU is virtual, so there is no process on it to be measured",
            id="virtual",
        ),
    ],
)
def test_what_is_not_known_is_said_and_never_0(
    gpus: dict[str, str],
    cuda: dict[str, Any] | None,
    knowledge: str,
    missing: str,
    tmp_path: Path,
) -> None:
    rows = BY_PROCESS if knowledge == "virtual" else []
    summary = write(tmp_path / "run", rows, gpus=gpus, cuda=cuda, knowledge=knowledge)
    one = primary(summary)
    assert (one.peak.process, one.peak.external, one.external) == (None, None, None)
    assert one.memory.missing == missing
    assert f"memory unknown: {missing}" in " ".join(to_text(report(summary, 0)).split())
    assert document(summary, 0)["process"]["missing"] == missing


def test_a_virtual_gpu_has_the_figures_of_its_catalogue_only(tmp_path: Path) -> None:
    devices = [{"total": 4096 * MIB, "context": 256 * MIB}]
    one = primary(
        write(
            tmp_path / "run",
            BY_PROCESS,
            gpus={UUID: "by process"},
            knowledge="virtual",
            virtual_gpu={"devices": devices},
        )
    )
    assert one.memory.missing is not None
    assert one.memory.missing.endswith("; on such a card a context takes 256.0 MiB")


def test_the_only_gpu_needs_no_uuid(tmp_path: Path) -> None:
    one = primary(write(tmp_path / "run", BY_PROCESS, gpus={UUID: "by process"}))
    assert one.peak.process == CONTEXT + 67 * MIB


def test_a_killed_launcher_leaves_the_gpus_in_its_samples(tmp_path: Path) -> None:
    rows = [*BY_PROCESS, (440_000, None, f"nvml-used:{UUID}", 1)]
    summary = write(tmp_path / "run", rows, cuda=CUDA, state="running", files=None)
    assert primary(summary).peak.process == CONTEXT + 67 * MIB


def test_in_a_container_the_only_process_on_the_gpu_is_ours_while_it_has_tensors_there(
    tmp_path: Path,
) -> None:
    """Before and after, it may have been anybody."""
    sole = [(t, None, f"nvml-sole:{UUID}", v) for t, v in [*READINGS, (500_000, 7)]]
    one = primary(write(tmp_path / "run", sole, gpus={UUID: "not available: …"}, cuda=CUDA))
    assert one.memory.value.tolist() == [value for _, value in READINGS[2:]]


def test_processes_with_one_id_keep_their_samples_apart(tmp_path: Path) -> None:
    rows = [
        (1, PID, "start", 500),
        (2, PID, "rss", 100 * MIB),
        (3, PID, "start", 900),
        (4, PID, "rss", 7 * MIB),
        (5, PID, "hwm", 8 * MIB),
    ]
    folder = tmp_path / "run"
    unrecorded = [{"pid": PID, "start_ticks": 900, "argv": ["x"]}]
    write(folder, rows, unrecorded=unrecorded, files=None)
    manifest = {"pid": PID, "start_ticks": 500, "state": "ended", "torch": "2.14.1"}
    write_manifest(folder / str(PID), manifest)
    trace = open_trace(folder)
    (process,) = trace.processes
    assert process_memory(trace, process).peak == 100 * MIB
    (other,) = summarise(trace).unrecorded
    assert (other.argv, other.rss_peak) == (("x",), 8 * MIB)


INTEGERS = st.integers(-(1 << 63), (1 << 63) - 1)
ROWS = st.tuples(
    st.none() | st.integers(0, 1 << 40) | INTEGERS,
    st.none() | st.sampled_from([PID, 1]) | INTEGERS,
    st.none() | st.sampled_from(["start", "rss", "hwm", f"nvml:{UUID}", f"nvml-others:{UUID}"]),
    st.none() | INTEGERS,
)


@settings(max_examples=40)
@given(rows=st.lists(ROWS, max_size=12))
def test_samples_of_a_killed_launcher_may_hold_anything(
    rows: list[tuple[int, int | None, str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run") / "run"
    summary = write(folder, rows, cuda=CUDA, state="running", files=None)
    assert to_text(report(summary, top=0))
    assert json.dumps(document(summary, top=0))
