"""Where a run peaked, what stood there, and what it held above its steady state."""

from pathlib import Path

import pytest
from hypothesis import given, settings

from memtrace.analysis.peaks import top_allocations
from memtrace.analysis.places import Place, place
from memtrace.analysis.summary import AccountSummary, Summary, summarise
from memtrace.trace.reader import open_trace
from memtrace.trace.schema import Action
from tests.synthetic import PID, History, histories, prefill

KIB, MIB = 1 << 10, 1 << 20


def summary_of(history: History, folder: Path) -> Summary:
    return summarise(open_trace(history.write(folder / "run.memtrace")))


def account_of(history: History, folder: Path) -> AccountSummary:
    primary = summary_of(history, folder).primary
    assert primary is not None
    return primary


def test_the_peak_of_a_prefill_is_the_last_layers_workspace(tmp_path: Path) -> None:
    one = account_of(prefill(layers=4, chunks=3), tmp_path)
    assert one.peak.allocated == 4 * MIB + 512 * KIB + 3 * 128 * KIB + 3 * 64 * KIB + 300 * KIB
    assert one.peak.components == {
        "model": 4 * MIB,
        "KV_res": 512 * KIB + 3 * 128 * KIB,
        "Hidden": 3 * 64 * KIB,
        "Act": 300 * KIB,
        "Temp": 0,
        "backend": 0,
        "other": 0,
    }
    assert one.peak.details == {"KV_res/compact": 3 * 128 * KIB, "KV_res/full": 512 * KIB}
    assert one.place == Place(request="q1", phase="prefill", layer=3, chunk=0, op="aten.mm")
    assert one.own_peaks["Temp"] == 128 * KIB
    assert one.end.components["KV_res"] == 4 * 128 * KIB


def test_process_memory_at_the_peak_is_the_nearest_sample(tmp_path: Path) -> None:
    one = account_of(prefill(), tmp_path)
    assert one.peak.process == 85 * MIB + 300 * KIB
    assert one.peak.process_time_us is not None
    assert abs(one.peak.process_time_us - one.peak.time_us) < 10_000
    assert (one.peak.allocator, one.peak.external) == (0, one.peak.process - one.peak.allocated)
    assert one.memory.peak == 86 * MIB + 300 * KIB


def test_the_kernels_high_water_mark_wins_over_samples(tmp_path: Path) -> None:
    run = prefill().write(tmp_path / "run", manifest={"process_peak": {str(PID): 123 * MIB}})
    summary = summarise(open_trace(run))
    assert summary.memory is not None
    assert summary.memory.peak == 123 * MIB


def test_unknown_process_memory_stays_unknown(tmp_path: Path) -> None:
    history = History()
    history.alloc(10, "Act")
    one = account_of(history, tmp_path)
    assert (one.peak.process, one.peak.external, one.memory.peak) == (None, None, None)
    assert one.own_peaks["external"] is None


def test_meta_tensors_take_no_process_memory(tmp_path: Path) -> None:
    history = History()
    history.alloc(1 << 40, "model", device="meta")
    history.sample("rss", 5)
    one = account_of(history, tmp_path)
    assert (one.peak.process, one.peak.allocator, one.peak.external) == (None, None, None)


def test_negative_external_is_shown_as_it_is(tmp_path: Path) -> None:
    history = History()
    history.alloc(100, "Act")
    history.sample("rss", 60)
    assert account_of(history, tmp_path).peak.external == -40


def test_above_steady_is_the_peak_without_model_and_without_the_compact_cache(
    tmp_path: Path,
) -> None:
    one = account_of(prefill(layers=4, chunks=3), tmp_path)
    peak = 512 * KIB + 3 * 128 * KIB + 3 * 64 * KIB + 300 * KIB
    assert one.above_steady == peak - 4 * 128 * KIB


def test_above_steady_without_a_prefill_takes_the_end(tmp_path: Path) -> None:
    history = History()
    history.alloc(1000, "model")
    kept = history.alloc(30, "KV_res")
    history.free(history.alloc(100, "Act"))
    history.retag(kept, "KV_res/compact")
    assert account_of(history, tmp_path).above_steady == 100


def test_above_steady_ignores_what_loading_and_decoding_took(tmp_path: Path) -> None:
    history = History()
    history.free(history.alloc(10_000, "other"))
    with history.scope("phase", "prefill"):
        history.alloc(30, "KV_res/compact")
        workspace = history.alloc(200, "Act")
        history.free(workspace)
        history.alloc(1, "Temp")
    with history.scope("phase", "decode"):
        history.alloc(5_000, "Act")
    assert account_of(history, tmp_path).above_steady == 200


def test_above_steady_ignores_buffers_that_are_freed_after_the_prefill(tmp_path: Path) -> None:
    history = History()
    with history.scope("phase", "prefill"):
        full = history.alloc(500, "KV_res/full")
        history.alloc(30, "KV_res/compact")
    history.free(full)
    assert account_of(history, tmp_path).above_steady == 500


def test_top_allocations_fold_layers_and_keep_where_they_were_made(tmp_path: Path) -> None:
    one = account_of(prefill(layers=4), tmp_path)
    assert [(g.component, g.count, g.bytes, g.where) for g in one.top] == [
        ("model", 4, 4 * MIB, "aten.empty"),
        ("KV_res/full", 1, 512 * KIB, "prefill > layer 3 > aten.empty.memory_format"),
        ("KV_res/compact", 3, 384 * KIB, "compress > layers 0-2 > aten.gather"),
        ("Act", 1, 300 * KIB, "prefill > layer 3 > aten.mm"),
        ("Hidden", 3, 192 * KIB, "prefill > aten.empty.memory_format"),
    ]


@settings(max_examples=60)
@given(history=histories())
def test_top_allocations_sum_to_the_allocated_bytes_at_any_event(
    history: History, tmp_path_factory: pytest.TempPathFactory
) -> None:
    one = account_of(history, tmp_path_factory.mktemp("run"))
    for event in range(len(history.rows["events"])):
        groups = top_allocations(one.account, event)
        assert sum(group.bytes for group in groups) == one.account.allocated.read_one(event)
        assert all(group.count > 0 for group in groups)
    last = top_allocations(one.account, len(history.rows["events"]) - 1)
    assert sum(group.count for group in last) == len(history.live)


def test_stacks_are_shown_innermost_first(tmp_path: Path) -> None:
    history = History()
    history.rows["stacks"].append((["a.py:1:inner", "b.py:2:outer"],))
    history.rows["contexts"].append((Action.ALLOC, "cpu", 0, None, "Act", None, 0, 0))
    history.rows["events"].append((1000, 1, 64, 64, 0))
    [group] = account_of(history, tmp_path).top
    assert group.stack == ("a.py:1:inner", "b.py:2:outer")


def test_modules_fold_their_indices(tmp_path: Path) -> None:
    history = History()
    for layer in range(3):
        with history.scope("module", f"model.layers.{layer}.mlp"):
            history.alloc(10, "Act")
    one = account_of(history, tmp_path)
    assert [(group.place.module, group.count) for group in one.top] == [("model.layers.*.mlp", 3)]
    scope = one.account.process.contexts["scope"][2]
    assert place(one.account.process, int(scope)).module == "model.layers.2.mlp"


def test_several_processes_and_their_requests_are_all_there(tmp_path: Path) -> None:
    run = prefill().write(tmp_path / "run", complete=False)
    prefill(scale=10).write(tmp_path / "other", complete=False, process={"pid": 99})
    (tmp_path / "other" / str(PID)).rename(run / "99")
    summary = summarise(open_trace(run))
    assert [process.pid for process in summary.processes] == [PID, 99]
    assert [one.pid for one in summary.accounts] == [99, PID]
    assert [(row.pid, row.name, row.prompt_tokens) for row in summary.requests] == [
        (PID, "q1", 512),
        (99, "q1", 512),
    ]
