"""What becomes of a snapshot: its last state exactly, its history as far as it is possible."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memtrace.errors import MemtraceError
from memtrace.interchange.importer import Imported, import_snapshot
from memtrace.trace.reader import ProcessTrace
from tests.interchange.runs import (
    actions,
    assert_consistent,
    assert_state,
    open_one,
    rows,
    unseen,
)
from tests.interchange.snapshots import (
    ALL,
    BASE,
    DATA,
    MIB,
    SHARED,
    block,
    dump,
    entry,
    free,
    load,
    segment,
    snapshot,
)

RICH = DATA / "rich_oom_torch2.15.0.pickle"


@pytest.fixture
def imported(tmp_path: Path) -> Callable[[Any], ProcessTrace]:
    """Imports a snapshot and checks what must hold for every one."""

    def of(data: dict[str, Any]) -> ProcessTrace:
        import_snapshot(dump(data, tmp_path), tmp_path / "run")
        assert_consistent(tmp_path / "run")
        assert_state(tmp_path / "run", data)
        return open_one(tmp_path / "run")[1]

    return of


# -- every snapshot there is -----------------------------------------------------------------------


@pytest.mark.parametrize("file", ALL, ids=lambda file: file.stem)
def test_the_last_state_is_that_of_its_segments(tmp_path: Path, file: Path) -> None:
    made = import_snapshot(file, tmp_path / "run")
    assert_consistent(tmp_path / "run")
    assert_state(tmp_path / "run", load(file))
    if "synthetic" not in file.stem:
        assert made.impossible == 0


def test_snapshots_that_others_recorded_are_at_hand() -> None:
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} isn't there: only the snapshots in tests/data are imported")


def test_an_impossible_history_is_reported(tmp_path: Path) -> None:
    file = SHARED / "public" / "synthetic-mosaic.pickle"
    if not file.exists():
        pytest.skip(f"{file} isn't there")
    made = import_snapshot(file, tmp_path / "run")
    assert made.impossible == made.entries == 1040
    assert "1040 of 1040 entries of cuda:0, whose history is inconsistent" in " ".join(made.unseen)


# -- older versions --------------------------------------------------------------------------------


def _without(*keys: str) -> Callable[[dict[str, Any]], None]:
    def drop(data: dict[str, Any]) -> None:
        for one in data["device_traces"][0]:
            for key in keys:
                one.pop(key, None)

    return drop


def _old_blocks(data: dict[str, Any]) -> None:
    for one in data["segments"]:
        for part in one["blocks"]:
            del part["address"]


def _old_word(data: dict[str, Any]) -> None:
    for one in data["segments"]:
        for part in one["blocks"]:
            part["state"] = part["state"].replace("pending_free", "awaiting_free")


def _listed_pools(data: dict[str, Any]) -> None:
    for one in data["device_traces"][0]:
        one["pool_id"] = list(one["pool_id"])
    for one in data["segments"]:
        one["segment_pool_id"] = list(one["segment_pool_id"])


OLDER: dict[str, Callable[[dict[str, Any]], None]] = {
    "2.12: no pool_id": _without("pool_id"),
    "2.9: no user_metadata": _without("pool_id", "user_metadata"),
    "2.6: no compile_context": _without("pool_id", "user_metadata", "compile_context"),
    "2.1: no time_us": _without("pool_id", "user_metadata", "compile_context", "time_us"),
    "no frames": _without("frames"),
    "2.0: no address of blocks": _old_blocks,
    "another word for pending": _old_word,
    "pools as lists": _listed_pools,
    "no settings": lambda data: data.pop("allocator_settings"),
    "no annotations": lambda data: data.pop("external_annotations"),
}


@pytest.mark.parametrize("version", OLDER)
def test_what_older_versions_lack_changes_nothing_else(tmp_path: Path, version: str) -> None:
    data = load(RICH)
    del data["host_segments"], data["host_traces"]
    import_snapshot(dump(data, tmp_path), tmp_path / "new")
    OLDER[version](data)
    import_snapshot(dump(data, tmp_path), tmp_path / "old")
    assert_consistent(tmp_path / "old")

    def moves(run: str) -> list[Any]:
        # address, bytes, requested, action, device, stream, pool
        return [row[1:8] for row in rows(open_one(tmp_path / run)[1]) if row[4] != "RETAG"]

    assert moves("old") == moves("new")


def test_a_list_of_segments_is_a_snapshot_without_history(tmp_path: Path) -> None:
    data = load(RICH)
    made = import_snapshot(dump(data["segments"], tmp_path), tmp_path / "run")
    assert made.entries == 0
    assert_state(tmp_path / "run", {"segments": data["segments"]})
    assert "the snapshot has only its last state" in " ".join(made.unseen)


def test_without_times_it_says_so(imported: Callable[[Any], ProcessTrace]) -> None:
    data = load(RICH)
    del data["host_segments"], data["host_traces"]
    _without("time_us")(data)
    process = imported(data)
    assert "recorded no times" in unseen(process)
    assert process.manifest["time_zero_us"] is None


# -- what entries say ------------------------------------------------------------------------------


def test_every_kind_of_entry_has_its_event(tmp_path: Path) -> None:
    import_snapshot(RICH, tmp_path / "run")
    process = open_one(tmp_path / "run")[1]
    found = set(actions(process))
    assert {"ALLOC", "FREE", "SEGMENT_ALLOC", "OOM", "RETAG"} <= found
    (oom,) = (row for row in rows(process) if row[4] == "OOM")
    entry_ = next(one for one in load(RICH)["device_traces"][0] if one["action"] == "oom")
    assert oom[1:3] == (entry_["device_free"], entry_["size"])
    assert {row[7] for row in rows(process) if row[4] == "ALLOC"} == {None, "0.1"}
    assert actions(process, "cpu:pinned") == ["SEGMENT_ALLOC", "ALLOC"]


def _texts(*texts: str, **more: Any) -> dict[str, Any]:
    """A snapshot with an allocation under each metadata, all alive."""
    entries = [entry("segment_alloc", BASE, 2 * MIB)]
    for number, text in enumerate(texts):
        entries.append(entry("alloc", BASE + 512 * number, 512, user_metadata=text, **more))
    live = [block(512) for _ in texts]
    last = segment(BASE, *live, block(2 * MIB - 512 * len(texts), "inactive"))
    return snapshot([last], entries)


def test_metadata_of_ours_bring_component_and_scope_back(
    imported: Callable[[Any], ProcessTrace],
) -> None:
    process = imported(_texts("memtrace:KV_res/full|request=q1|phase=prefill|layer=3"))
    (row,) = (row for row in rows(process) if row[4] == "ALLOC")
    assert row[8] == "KV_res/full"
    assert row[10] == (("request", "q1"), ("phase", "prefill"), ("layer", "3"))


def test_a_snapshot_taken_while_memtrace_recorded_has_its_components(tmp_path: Path) -> None:
    import_snapshot(DATA / "memtrace_2gpus_expandable_torch2.14.1.pickle", tmp_path / "run")
    process = open_one(tmp_path / "run")[1]
    born = {row[8] for row in rows(process) if row[4] == "ALLOC"}
    assert born == {"Act", "Temp", "KV_res/full"}
    (retag,) = (row for row in rows(process) if row[4] == "RETAG")
    assert retag[8] == "KV_res/compact"
    assert retag[10][:2] == (("request", "q1"), ("phase", "prefill"))


def test_metadata_of_others_become_a_tag_or_name_a_component(
    imported: Callable[[Any], ProcessTrace],
) -> None:
    texts = ("Act", "kv_cache", "", "memtrace:Act|layer=third", "memtrace:nothing", "a\0b|c=d")
    process = imported(_texts(*texts))
    said = [(row[8], row[10]) for row in rows(process) if row[4] == "ALLOC"]
    assert said[0] == ("Act", ())
    assert said[1] == ("other", (("tag", "kv_cache"),))
    assert said[2] == ("other", ())
    assert said[3:] == [("other", (("tag", text),)) for text in texts[3:]]


def test_where_it_was_compiled_and_what_the_allocator_noted_lie_around(
    imported: Callable[[Any], ProcessTrace],
) -> None:
    data = _texts("weights", compile_context="0/1", internal_metadata="mallocWithAddress")
    (row,) = (row for row in rows(imported(data)) if row[4] == "ALLOC")
    assert row[10] == (
        ("compile", "0/1"),
        ("internal", "mallocWithAddress"),
        ("tag", "weights"),
    )


def test_annotations_of_tensors_retag(imported: Callable[[Any], ProcessTrace]) -> None:
    data = _texts("")
    for text in ("memtrace>Hidden|layer=1", "memtrace>Act?Temp", "KV_res", "layer 0 K"):
        data["device_traces"][0].append(entry("annotate", BASE, 512, user_metadata=text))
    for number, one in enumerate(data["device_traces"][0]):
        one["time_us"] = number
    said = [(row[9], row[8], row[10]) for row in rows(imported(data)) if row[4] == "RETAG"]
    assert said == [
        ("other", "Hidden", (("layer", "1"),)),
        ("Hidden", "KV_res", ()),  # the second didn't apply: it wasn't Temp
        ("KV_res", "KV_res", (("tag", "layer 0 K"),)),
    ]


def test_frames_are_stacks_and_the_forward_pass_lies_behind(
    imported: Callable[[Any], ProcessTrace],
) -> None:
    frames = [
        {"filename": "a.py", "line": 3, "name": "f"},
        {"filename": "b.py", "line": 9, "name": "g"},
    ]
    data = _texts("", frames=frames, forward_frames=["h, c.py:1"])
    (row,) = (row for row in rows(imported(data)) if row[4] == "ALLOC")
    assert row[11] == ("a.py:3:f", "b.py:9:g", "forward: h, c.py:1")


def _annotated(*borders: tuple[str, str, int]) -> dict[str, Any]:
    data = _texts(*[""] * 8)  # at 1001, 1002, …
    data["external_annotations"] = [
        {"name": name, "stage": stage, "device": 0, "time_us": time_us}
        for name, stage, time_us in borders
    ]
    return data


def test_ranges_that_nest_are_phases(imported: Callable[[Any], ProcessTrace]) -> None:
    data = _annotated(
        ("prefill", "START", 1002),
        ("layer", "START", 1003),
        ("layer", "END", 1005),
        ("prefill", "END", 1006),
        ("decode", "START", 1007),
        ("decode", "END", 1100),
    )
    outer, inner = ("phase", "prefill"), ("phase", "layer")
    paths = [row[10] for row in rows(imported(data)) if row[4] == "ALLOC"]
    assert paths[:5] == [(), (outer,), (outer, inner), (outer, inner), (outer,)]
    assert paths[5:] == [(), (("phase", "decode"),), (("phase", "decode"),)]


def test_ranges_that_cross_or_never_end_are_said(imported: Callable[[Any], ProcessTrace]) -> None:
    data = _annotated(
        ("a", "START", 1002),
        ("b", "START", 1003),
        ("a", "END", 1004),
        ("b", "END", 1006),
        ("c", "START", 1006),
        ("d", "END", 1007),
    )
    process = imported(data)
    assert "3 annotations of cuda:0 that don't nest as phases do" in unseen(process)
    assert {row[10] for row in rows(process) if row[4] == "ALLOC"} == {(), (("phase", "a"),)}


def test_a_block_waits_for_its_stream(imported: Callable[[Any], ProcessTrace]) -> None:
    entries = [
        entry("segment_alloc", BASE, 2 * MIB),
        entry("alloc", BASE, 512),
        entry("free_requested", BASE, 512),
        entry("alloc", BASE + 512, 512),
        entry("free_completed", BASE, 512),
        entry("free_requested", BASE + 512, 512),
    ]
    last = segment(
        BASE,
        block(512, "inactive"),
        block(512, "active_pending_free"),
        block(2 * MIB - 1024, "inactive"),
    )
    found = actions(imported(snapshot([last], entries)))
    middle = ["ALLOC", "FREE_REQUESTED", "ALLOC", "FREE_COMPLETED", "FREE_REQUESTED"]
    assert found == ["SEGMENT_ALLOC", *middle]


def test_devices_are_told_apart_and_merged_by_time(imported: Callable[[Any], ProcessTrace]) -> None:
    def trace(start: int) -> list[dict[str, Any]]:
        return [
            entry("segment_alloc", BASE, 2 * MIB, time_us=start),
            entry("alloc", BASE, 2 * MIB, time_us=start + 10),
        ]

    segments = [segment(BASE, block(2 * MIB), device=number) for number in range(2)]
    found = rows(imported(snapshot(segments, trace(100), trace(105))))
    assert [(row[0], row[5]) for row in found] == [
        (0, "cuda:0"),
        (5, "cuda:1"),
        (10, "cuda:0"),
        (15, "cuda:1"),
    ]


def test_an_older_torch_has_the_private_pool_in_its_segments(
    imported: Callable[[Any], ProcessTrace],
) -> None:
    entries = [
        entry("segment_alloc", BASE, 2 * MIB),
        entry("alloc", BASE, 2 * MIB),
        entry("segment_alloc", BASE + 2 * MIB, 2 * MIB),
        entry("alloc", BASE + 2 * MIB, 2 * MIB),
    ]
    segments = [
        segment(BASE, block(2 * MIB)),
        segment(BASE + 2 * MIB, block(2 * MIB), segment_pool_id=(0, 7)),
    ]
    assert [row[7] for row in rows(imported(snapshot(segments, entries)))] == [
        None,
        None,
        "0.7",
        "0.7",
    ]


# -- a history that doesn't begin with an empty allocator ------------------------------------------


def test_what_was_there_before_is_found_by_walking_back(
    imported: Callable[[Any], ProcessTrace],
) -> None:
    """A block from before is freed, its segment returned; another from before still lives."""
    entries = [
        *free(BASE, 4 * MIB),
        entry("segment_free", BASE, 20 * MIB),
        entry("segment_alloc", BASE + 64 * MIB, 20 * MIB),
        entry("alloc", BASE + 64 * MIB, 8 * MIB),
    ]
    last = [
        segment(BASE + 32 * MIB, block(2 * MIB)),
        segment(BASE + 64 * MIB, block(8 * MIB), block(12 * MIB, "inactive")),
    ]
    process = imported(snapshot(last, entries))
    before = [row for row in rows(process) if row[10] == (("op", "before the recording"),)]
    assert [(row[4], row[1] - BASE, row[2]) for row in before] == [
        ("SEGMENT_ALLOC", 0, 20 * MIB),
        ("SEGMENT_ALLOC", 32 * MIB, 2 * MIB),
        ("ALLOC", 0, 4 * MIB),
        ("ALLOC", 32 * MIB, 2 * MIB),
    ]
    assert "the recording began or the history's ring overflowed there" in unseen(process)
    assert "6.0 MiB" in unseen(process)


def test_a_block_that_was_recorded_without_its_allocation_proves_an_overflow(
    imported: Callable[[Any], ProcessTrace],
) -> None:
    frames = [{"filename": "a.py", "line": 3, "name": "f"}]
    last = segment(BASE, block(MIB, frames=frames), block(MIB, "inactive"))
    process = imported(snapshot([last], [entry("alloc", BASE + MIB, 512), *free(BASE + MIB, 512)]))
    assert "ring overflowed or was cleared" in unseen(process)


def test_a_history_from_an_empty_allocator_lacks_nothing(tmp_path: Path) -> None:
    made = import_snapshot(DATA / "rich_oom_torch2.13.0.pickle", tmp_path / "run")
    assert len(made.unseen) == 1  # which process it was


def test_a_ring_that_overflowed_loses_what_it_lost_and_no_more(tmp_path: Path) -> None:
    """Wherever the first entries are gone, the rest gives the same events, byte for byte."""
    whole = DATA / "rich_oom_torch2.13.0.pickle"
    import_snapshot(whole, tmp_path / "whole")

    def events(run: Path) -> list[Any]:
        # address, bytes, requested
        found = rows(open_one(run)[1])
        return [row[1:4] for row in found if row[10] != (("op", "before the recording"),)]

    everything = events(tmp_path / "whole")
    for gone in range(1, 80):
        data = load(whole)
        del data["device_traces"][0][:gone]
        if data["device_traces"][0][0]["action"] == "free_completed":
            continue  # a block that was waiting already is none of the events
        run = tmp_path / str(gone)
        made = import_snapshot(dump(data, tmp_path), run)
        assert made.impossible == 0
        assert_state(run, data)
        left = events(run)
        assert left == everything[len(everything) - len(left) :]


def _slack(gap: int, *entries: dict[str, Any]) -> dict[str, Any]:
    """Before: a block of 2 MiB + 512 asked for, ``gap`` bytes, and a block that still lives."""
    size = 2 * MIB + 512
    room = size + gap
    rest = 20 * MIB - room - 4 * MIB
    last = segment(BASE, block(room, "inactive"), block(4 * MIB), block(rest, "inactive"))
    return snapshot([last], [*entries, *free(BASE, size)])


def test_slack_that_a_history_doesnt_tell_is_said(imported: Callable[[Any], ProcessTrace]) -> None:
    """Up to 1 MiB behind a block of the large pool may belong to it: nobody knows."""
    process = imported(_slack(MIB))
    (row,) = (row for row in rows(process) if row[4] == "FREE")
    assert row[2] == 3 * MIB + 512
    assert "the exact size of 1 blocks of cuda:0" in unseen(process)


def test_an_allocation_tells_where_a_block_ended(imported: Callable[[Any], ProcessTrace]) -> None:
    """It was handed out behind where that could have ended: the rest was slack."""
    at = BASE + 2 * MIB + 512 + MIB // 2
    process = imported(_slack(6 * MIB, entry("alloc", at, 2 * MIB), *free(at, 2 * MIB)))
    sizes = [row[2] for row in rows(process) if row[4] == "FREE"]
    assert sizes == [2 * MIB, 2 * MIB + 512 + MIB // 2]
    assert "exact size" not in unseen(process)


def test_expandable_segments_are_walked_back_too(imported: Callable[[Any], ProcessTrace]) -> None:
    entries = [
        entry("segment_unmap", BASE + 40 * MIB, 20 * MIB),
        *free(BASE, 8 * MIB),
        entry("segment_unmap", BASE, 20 * MIB),
        entry("segment_map", BASE + 40 * MIB, 20 * MIB),
        entry("alloc", BASE + 40 * MIB, 5 * MIB),
    ]
    blocks = [block(20 * MIB), block(5 * MIB), block(15 * MIB, "inactive")]
    last = segment(BASE + 20 * MIB, *blocks, is_expandable=True)
    found = rows(imported(snapshot([last], entries)))
    assert [(row[4], row[1] - BASE, row[2]) for row in found[:3]] == [
        ("SEGMENT_MAP", 0, 60 * MIB),
        ("ALLOC", 0, 8 * MIB),
        ("ALLOC", 20 * MIB, 20 * MIB),
    ]


# -- histories that can't be -----------------------------------------------------------------------


def test_entries_that_contradict_the_rest_are_counted_and_left_out(
    imported: Callable[[Any], ProcessTrace],
) -> None:
    data = load(RICH)
    trace = data["device_traces"][0]
    trace.insert(10, entry("alloc", 512, 1 << 30, time_us=trace[9]["time_us"]))
    trace.insert(11, entry("free_completed", 1024, 1 << 30, time_us=trace[9]["time_us"]))
    process = imported(data)
    assert "2 of 83 entries of cuda:0, whose history is inconsistent" in unseen(process)
    assert process.manifest["dropped"] == 2


def test_what_other_threads_did_after_the_history_is_said(
    imported: Callable[[Any], ProcessTrace],
) -> None:
    """The history is read before the segments are: a block appears and one is gone."""
    entries = [
        entry("segment_alloc", BASE, 2 * MIB),
        entry("alloc", BASE, 512),
        entry("alloc", BASE + 512, 512),
        *free(BASE + 512, 512),
    ]
    last = segment(BASE, block(512, "inactive"), block(1024), block(2 * MIB - 1536, "inactive"))
    process = imported(snapshot([last], entries))
    assert actions(process)[:4] == ["SEGMENT_ALLOC", "ALLOC", "ALLOC", "FREE"]
    assert "between its history and its segments: 2 changes" in unseen(process)


def test_an_unknown_action_is_said(imported: Callable[[Any], ProcessTrace]) -> None:
    data = _texts("")
    data["device_traces"][0].append(entry("defragment", BASE, 1, time_us=2000))
    data["device_traces"][0].append(entry("snapshot", 0, 512, time_us=2000))
    assert "1 entries with an action that memtrace doesn't know (defragment)" in unseen(
        imported(data)
    )


def test_segments_with_gaps_are_said(imported: Callable[[Any], ProcessTrace]) -> None:
    data = snapshot([segment(BASE, block(512), total_size=2 * MIB, allocated_size=4096)])
    process = imported(data)
    assert "1 gaps between the blocks" in unseen(process)
    assert "1 segments that say another allocated size" in unseen(process)


def test_a_history_of_nothing_but_the_impossible_is_empty(
    imported: Callable[[Any], ProcessTrace],
) -> None:
    process = imported(snapshot([], free(BASE, 512)))
    assert len(process.events["id"]) == 0
    assert process.manifest["dropped"] == 2


# -- what is refused -------------------------------------------------------------------------------

WRONG: dict[str, tuple[Any, str]] = {
    "a number": (7, "has no segments"),
    "no segments": ({"device_traces": []}, "has no segments"),
    "segments of text": ({"segments": ["x"]}, "its segments aren't all dicts"),
    "a segment of a device -5": (
        snapshot([segment(BASE, block(512), device=-5)]),
        "its segments don't all have a 'device'",
    ),
    "an address of True": (
        {"segments": [segment(BASE, block(512)) | {"address": True}]},
        "its segments don't all have a 'address'",
    ),
    "an address of 2^63": (
        {"segments": [segment(1 << 63, block(512))]},
        "its segments don't all have a 'address'",
    ),
    "blocks outside of their segment": (
        {"segments": [segment(BASE, block(1024), total_size=512)]},
        "don't fit into it",
    ),
    "segments that overlap": (
        {"segments": [segment(BASE, block(1024)), segment(BASE + 512, block(1024))]},
        "overlap",
    ),
    "a state that isn't one": (
        {"segments": [segment(BASE, block(512, "asleep"))]},
        "no state that memtrace knows",
    ),
    "an entry that is no dict": (snapshot([]) | {"device_traces": [[1]]}, "aren't all dicts"),
    "an action of 3": (
        snapshot([], [entry("alloc", 0, 1) | {"action": 3}]),
        "whose 'action' is no text",
    ),
    "a size of None": (
        snapshot([], [entry("alloc", 0, 1) | {"size": None}]),
        "don't all have a 'size'",
    ),
    "a time of text": (
        snapshot([], [entry("alloc", 0, 1, time_us="now")]),
        "don't all have a 'time_us'",
    ),
    "frames of text": (_texts("", frames="here"), "frames are no list"),
    "a frame without a line": (_texts("", frames=[{"name": "f"}]), "a frame without"),
    "metadata of 4": (_texts(4), "whose 'user_metadata' is no text"),  # type: ignore[arg-type]
    "pools of text": (_texts("", pool_id="x"), "a pool that isn't named by two numbers"),
    "settings of text": ({"segments": [], "allocator_settings": "x"}, "allocator_settings"),
    **{
        f"a threshold of {share}": (
            {"segments": [], "allocator_settings": {"garbage_collection_threshold": share}},
            "allocator_settings",
        )
        for share in (None, "x", -1, 1.0, float("nan"))
    },
    "an annotation of 5": (
        {"segments": [], "external_annotations": [{"name": 5, "stage": "START"}]},
        "whose 'name' is no text",
    ),
    "ours of 5": ({"segments": [], "memtrace": 5}, "what memtrace export added to it is damaged"),
    "ours of a newer version": (
        {"segments": [], "memtrace": '{"version": 99}'},
        "a newer memtrace exported it",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_form_is_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    data, reason = WRONG[name]
    file = dump(data, tmp_path)
    with pytest.raises(MemtraceError, match=reason) as refused:
        import_snapshot(file, tmp_path / "run")
    assert "\n" not in str(refused.value) and str(file) in str(refused.value)
    assert list(tmp_path.iterdir()) == [file]


def test_few_bytes_cant_make_for_many_events(tmp_path: Path) -> None:
    trace = [entry("alloc", BASE, 512, time_us=0)] * 10_000
    data = {"segments": [], "device_traces": [trace] * 1000}
    with pytest.raises(MemtraceError, match="more entries .* than a file of its size can"):
        import_snapshot(dump(data, tmp_path), tmp_path / "run")


def test_few_bytes_cant_make_for_long_texts(tmp_path: Path) -> None:
    long = "x" * (1 << 20)
    stacks = [[{"filename": long, "line": line, "name": "f"}] for line in range(400)]
    data = _texts("")
    data["device_traces"][0] += [
        entry("alloc", 512 * number, 512, frames=stack, time_us=2000)
        for number, stack in enumerate(stacks)
    ]
    with pytest.raises(MemtraceError, match="texts would fill more"):
        import_snapshot(dump(data, tmp_path), tmp_path / "run")


def test_what_is_there_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(MemtraceError, match="is there already"):
        import_snapshot(RICH, tmp_path / "run")
    with pytest.raises(MemtraceError, match="can't be made"):
        import_snapshot(RICH, tmp_path / "no folder" / "run")


def test_the_outcome_is_told(tmp_path: Path) -> None:
    made = import_snapshot(RICH, tmp_path / "run")
    assert made == Imported(
        run=tmp_path / "run",
        devices=("cuda:0", "cpu:pinned"),
        entries=83,
        events=72,
        impossible=0,
        unseen=made.unseen,
    )
