"""The settings string: read and refused as PyTorch does, and what it makes of sizes."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrace.allocator.settings import OLDEST, UNLIMITED, Settings, SettingsError, parse_version
from memtrace.errors import MemtraceError
from tests.allocator.streams import random_text

MIB = 1 << 20
texts = st.integers(0, 1 << 32).map(lambda seed: random_text(random.Random(seed)))


@pytest.mark.parametrize(
    ("requested", "plain", "quarters"),
    # Blocks that PyTorch 2.13 handed out, without settings and with roundup_power2_divisions:4.
    [
        (1, 512, 512),
        (512, 512, 512),
        (513, 1024, 1024),
        (1200, 1536, 1536),
        (4097, 4608, 5120),
        (100_000, 100_352, 114_688),
        (MIB, MIB, MIB),
        (MIB + 1, 1_049_088, 5 * MIB // 4),
        (10 * MIB - 1, 10 * MIB, 10 * MIB),
        (33 * MIB, 33 * MIB, 40 * MIB),
        (300 * MIB + 1, 300 * MIB + 512, 320 * MIB),
    ],
)
def test_sizes_round_as_in_pytorch(requested: int, plain: int, quarters: int) -> None:
    assert Settings().round(requested) == plain
    assert Settings(divisions=(4,) * 16).round(requested) == quarters


def test_each_power_of_two_has_its_own_division() -> None:
    divisions = {"1": 0, "256": 1, "512": 2, "1024": 4, "32768": 8}
    found = Settings.of_snapshot({"max_split_size": -1, "roundup_power2_divisions": divisions})
    assert found.max_split_size == UNLIMITED
    assert found.round(600 * MIB) == 768 * MIB
    assert found.round(1100 * MIB) == 1280 * MIB
    assert found.round(40_000 * MIB + 1) == 40_960 * MIB


@pytest.mark.parametrize(
    ("text", "field", "value"),
    # As torch 2.14.1 reads them.
    [
        ("", "max_split_size", UNLIMITED),
        ("max_split_size_mb:20", "max_split_size", 20 * MIB),
        (" max_split_size_mb : 3 0 ", "max_split_size", 30 * MIB),
        ("max_split_size_mb:30,", "max_split_size", 30 * MIB),
        ("max_split_size_mb:30.5", "max_split_size", 30 * MIB),
        ("max_split_size_mb:30abc", "max_split_size", 30 * MIB),
        ("max_split_size_mb:-5", "max_split_size", UNLIMITED),
        ("max_split_size_mb:30,max_split_size_mb:40", "max_split_size", 40 * MIB),
        ("large_segment_size_mb:64", "max_non_split_rounding", 64 * MIB),
        ("max_non_split_rounding_mb:300,large_segment_size_mb:64", "large_segment", 64 * MIB),
        ("garbage_collection_threshold:.5", "gc_threshold", 0.5),
        ("garbage_collection_threshold:0.5x", "gc_threshold", 0.5),
        ("per_process_memory_fraction:0", "fraction", 0.0),
        ("per_process_memory_fraction:1", "fraction", 1.0),
        ("expandable_segments:True", "expandable", True),
        ("expandable_segments:True,expandable_segments:False", "expandable", False),
        ("throw_on_cudamalloc_oom:True", "throw_on_oom", True),
        ("backend:cudaMallocAsync", "backend", "cudaMallocAsync"),
        ("pinned_num_register_threads:4,pinned_use_background_threads:True", "expandable", False),
        ("release_lock_on_cudamalloc:True", "expandable", False),
        ("roundup_power2_divisions:4", "divisions", (4,) * 16),
        ("roundup_power2_divisions:[]", "divisions", (0,) * 16),
        ("roundup_power2_divisions:[256:2,]", "divisions", (2,) * 9 + (0,) * 7),
        ("roundup_power2_divisions:[1:2]", "divisions", (2,) + (0,) * 15),
        ("roundup_power2_divisions:[65536:2]", "divisions", (2,) * 16),
        (
            "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
            "divisions",
            (1,) * 9 + (2, 4) + (8,) * 5,
        ),
        ("roundup_power2_divisions:[256:0,>:8,512:4]", "divisions", (0,) * 9 + (4,) + (8,) * 6),
    ],
)
def test_settings_are_read_as_pytorch_does(text: str, field: str, value: object) -> None:
    assert getattr(Settings.parse(text, (2, 14)), field) == value


@pytest.mark.parametrize(
    "text",
    [
        "max_split_size_mb",
        "max_split_size_mb:",
        "max_split_size_mb:abc",
        "max_split_size_mb:19",
        "max_split_size_mb:0",
        "max_split_size_mb:30,,",
        "max_split_size_mb:99999999999999999999",
        f"max_split_size_mb:{'1' * 5000}",
        "x" * 5000,
        "max_split_size_mb:25,large_segment_size_mb:30",
        "large_segment_size_mb:30,max_split_size_mb:25",
        "large_segment_size_mb:10",
        "max_non_split_rounding_mb:19",
        "max_split_size_mb:30 expandable_segments:True",
        "Max_split_size_mb:30",
        "nonsense:1",
        ",",
        "expandable_segments:true",
        "expandable_segments:1",
        "garbage_collection_threshold:0",
        "garbage_collection_threshold:1",
        "garbage_collection_threshold:nan",
        "per_process_memory_fraction:1.5",
        "per_process_memory_fraction:-0.1",
        "roundup_power2_divisions:0",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:[100:2]",
        "roundup_power2_divisions:[256:3]",
        "roundup_power2_divisions:[256:1",
        "pinned_num_register_threads:3",
        "pinned_num_register_threads:256",
        "backend:other",
    ],
)
def test_what_pytorch_refuses_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(SettingsError) as refused:
        Settings.parse(text, (2, 14))
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    ("text", "since"),
    [
        ("expandable_segments:True", (2, 1)),
        ("graph_capture_record_stream_reuse:True", (2, 9)),
        ("per_process_memory_fraction:0.5", (2, 10)),
        ("max_split_size_mb:20", (2, 10)),  # before, the limit itself was refused
        ("large_segment_size_mb:64", (2, 11)),
        ("max_non_split_rounding_mb:20", (2, 10)),
        ("throw_on_cudamalloc_oom:True", (2, 12)),
        ("pinned_free_catch_all:True", (2, 12)),
        ("pinned_max_cached_size_mb:3", (2, 13)),
        ("expandable_segments_reserve:0.5", (2, 15)),
        ("expandable_segments_reserve_by_class:[some:0.5,other:40G]", (2, 15)),
    ],
)
def test_keys_are_as_old_as_in_pytorch(text: str, since: tuple[int, int]) -> None:
    Settings.parse(text, since)
    if since > OLDEST:
        with pytest.raises(SettingsError):
            Settings.parse(text, (since[0], since[1] - 1))


@pytest.mark.parametrize(
    ("text", "reservation"),
    # Of a device of 800 MiB, as torch 2.15.0 reserves them.
    [
        ("0.5", 400),
        ("+.25", 200),
        ("1e-1", 80),
        ("1", 800),
        ("0.5G", 512),
        ("0.5g", 512),
        ("2G", 900),
        *((ignored, 900) for ignored in ("0", "-1", "1.5", "100M", "0.1GB", "x", "inf", "nan")),
    ],
)
def test_what_an_expandable_segment_reserves(text: str, reservation: int) -> None:
    settings = Settings.parse(f"expandable_segments_reserve:{text}", (2, 15))
    assert settings.reservation(800 * MIB) == reservation * MIB


def test_the_rest_of_the_divisions_began_one_earlier_before_2_10() -> None:
    text = "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]"
    assert Settings.parse(text, (2, 10)).divisions == (1,) * 9 + (2, 4) + (8,) * 5
    assert Settings.parse(text, (2, 9)).divisions == (1,) * 9 + (2,) + (8,) * 6


@pytest.mark.parametrize(
    ("text", "version"),
    [("2.12.1+cu128", (2, 12)), ("2.13", (2, 13)), ("2.15.0a0+git1", (2, 15)), (" 2.1 ", (2, 1))],
)
def test_versions_are_read(text: str, version: tuple[int, int]) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize("text", ["", "main", "2", "v2.13", "2.0.1", "1.13"])
def test_what_is_no_known_version_is_refused(text: str) -> None:
    with pytest.raises(MemtraceError, match=r"version of torch|isn't known"):
        parse_version(text)


@given(st.text(st.sampled_from("mxsplit_:,[]>0123 \n."), max_size=40) | texts)
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        Settings.parse(text)
    except SettingsError as error:
        assert str(error)


@given(st.integers(1, 1 << 40), st.sampled_from([0, 1, 2, 4, 16, 64]))
def test_rounding_is_enough_and_idempotent(requested: int, divisions: int) -> None:
    settings = Settings(divisions=(divisions,) * 16)
    size = settings.round(requested)
    assert size >= max(requested, 512)
    assert settings.round(size) == size
    assert settings.segment(size) >= size
