"""Golden vectors: the allocator does what PyTorch's did, and the command says where it doesn't."""

import copy
import gzip
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memtrace.allocator.__main__ import main
from memtrace.allocator.golden import compare
from memtrace.allocator.vectors import Vector, VectorError

#: Recorded by make_golden.py.
OWN = sorted((Path(__file__).parent / "golden").glob("*.gz"))
#: More of them, where there are: of the allocators of five released versions.
SHARED = Path(
    os.environ.get(
        "MEMTRACE_VECTORS", Path(__file__).parents[3] / "shared/reference/allocator_vectors"
    )
)
STREAMS = [
    json.loads(line) for path in OWN for line in gzip.decompress(path.read_bytes()).splitlines()
]


def having(*names: str) -> dict[str, Any]:
    """The first of our streams with all these operations and actions, to be changed."""
    for stream in STREAMS:
        if set(names) <= {row[0] for row in stream["ops"] + stream["trace"]}:
            return copy.deepcopy(stream)
    raise AssertionError(f"no stream has {names}")


def difference(stream: dict[str, Any]) -> Any:
    found = compare(Vector.parse(json.dumps(stream)))
    return found and (found.operation, found.what, found.expected, found.found)


def write(path: Path, *streams: Any) -> Path:
    text = "".join(f"{json.dumps(stream)}\n" for stream in streams)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_ours_are_equal(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(path)]) == 0
    assert capsys.readouterr().out == "20 of 20 streams equal\n"


def test_those_of_released_versions_are_equal(capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted(map(str, SHARED.glob("*.jsonl.gz")))
    if not files:
        pytest.skip("no vectors of released versions lie beside the project")
    assert main(files) == 0, capsys.readouterr().out


def test_an_address_that_differs_is_told() -> None:
    stream = having("a")
    number = [n for n, op in enumerate(stream["ops"]) if op[0] == "a"][3]
    address = stream["alloc_result"][3]
    stream["alloc_result"][3] += 512
    assert difference(stream) == (number, "address", hex(address + 512), hex(address))


def test_a_counter_that_differs_is_told() -> None:
    stream = having("a")
    place = stream["columns"].index("active_bytes.small_pool.peak")
    stream["stats_after_op"]["36"][place] += 512
    operation, what, expected, found = difference(stream)
    assert (operation, what, expected - found) == (36, "active_bytes.small_pool.peak", 512)


def test_a_message_that_differs_is_told() -> None:
    stream = having("oom")
    message = stream["messages"][0]
    stream["messages"][0] = message.replace("Tried", "Wanted")
    _, what, expected, found = difference(stream)
    assert (what, expected.replace("Wanted", "Tried"), found) == ("message", found, repr(message))


@pytest.mark.parametrize("change", ["missing", "doubled", "other"])
def test_an_event_that_differs_is_told(change: str) -> None:
    stream = having("a")
    place = len(stream["trace"]) // 2
    if change == "missing":
        del stream["trace"][place]
    elif change == "doubled":
        stream["trace"].insert(place, ["alloc", 0, 1, 0])
    else:
        stream["trace"][place][2] += 1
    operation, what, _, _ = difference(stream)
    assert what == f"event {place}"
    assert 0 < operation < len(stream["ops"])


def test_the_first_of_several_differences_is_told() -> None:
    stream = having("a")
    stream["stats_after_op"]["48"][0] += 1
    stream["stats_after_op"]["24"][0] += 1
    assert difference(stream)[0] == 24


def test_a_missing_and_a_further_event_at_the_end_are_told() -> None:
    stream = having("a")
    stream["trace"].append(["oom", 5, 6, 0])
    assert difference(stream)[2:] == ("oom 5 free 6 stream 0x0", "no more events")
    del stream["trace"][-2:]
    assert difference(stream)[2] == "no more events"


def emptied(*released: list[Any]) -> dict[str, Any]:
    """Two segments that empty_cache gives back, as our own allocator does."""
    first, second = 0x7F0000000000, 0x7F0000200000
    return {
        "torch": "2.13.0",
        "settings": "",
        "total_memory": 1 << 30,
        "ops": [*released, ["a", 1, 9, 0], ["a", 2, 9, 1], ["f", 1], ["f", 2], ["e"]],
        "alloc_result": [first, second],
        "columns": [],
        "stats_after_op": {},
        "trace": [
            ["segment_alloc", first, 2 << 20, 0],
            ["alloc", first, 9, 0],
            ["segment_alloc", second, 2 << 20, 0x101000],
            ["alloc", second, 9, 0x101000],
            *([action, first, 9, 0] for action in ("free_requested", "free_completed")),
            *([action, second, 9, 0x101000] for action in ("free_requested", "free_completed")),
            ["segment_free", second, 2 << 20, 0x101000],
            ["segment_free", first, 2 << 20, 0],
        ],
    }


def test_segments_come_back_in_any_order_from_released_pools_only() -> None:
    assert difference(emptied()) is not None
    assert difference(emptied(["b", 1], ["d", 1], ["x", 1])) is None


def test_the_command_prints_one_line_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = having("oom")
    address, wrong["alloc_result"][0] = wrong["alloc_result"][0], "oom"
    path = write(tmp_path / "some.jsonl", having("a"), wrong)
    assert main([str(path)]) == 1
    told, count = capsys.readouterr().out.splitlines()
    assert told.startswith(f"{path}, line 2 (torch 2.10.0")
    assert 'operation 0, ["a", 1,' in told
    assert told.endswith(f"address: expected oom, found {address:#x}")
    assert count == "1 of 2 streams equal"


def test_the_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = having("a")
    wrong["stats_after_op"]["12"][wrong["columns"].index("active.all.peak")] = 77
    path = write(tmp_path / "some.jsonl.gz", wrong)
    assert main(["--json", str(path)]) == 1
    document = json.loads(capsys.readouterr().out)
    (file,) = document["files"]
    (told,) = file["differences"]
    assert (document["streams"], document["equal"], file["error"]) == (1, 0, None)
    assert (told["operation"], told["what"], told["expected"]) == (12, "active.all.peak", 77)


BAD: dict[str, Callable[[dict[str, Any]], None]] = {
    "the stream has no 'ops'": lambda s: s.pop("ops"),
    "'trace' is a NoneType, not a list": lambda s: s.update(trace=None),
    "the stream has no operations": lambda s: s.update(ops=[]),
    "there is no operation 'q'": lambda s: s["ops"].append(["q"]),
    "a takes 3 numbers": lambda s: s["ops"].append(["a", 1]),
    "an operation is a list": lambda s: s["ops"].append({"a": 1}),
    "bytes is -5, not a whole number": lambda s: s["ops"].insert(0, ["a", 900, -5, 0]),
    "stream is 1.5, not a whole number": lambda s: s["ops"].insert(0, ["a", 900, 5, 1.5]),
    "block 900 is not allocated": lambda s: s["ops"].append(["f", 900]),
    "block 900 is allocated already": lambda s: s["ops"].extend([["a", 900, 1, 0]] * 2),
    "no scope of pool 9 is open": lambda s: s["ops"].append(["d", 9]),
    "pool 9 is in use, or nobody has it": lambda s: s["ops"].append(["x", 9]),
    "'active.all.now' is no counter": lambda s: s["columns"].append("active.all.now"),
    " whole numbers": lambda s: s["stats_after_op"]["12"].append(1),
    "stats_after_op has operation '999'": lambda s: s["stats_after_op"].update({"999": []}),
    "'malloc' is no action": lambda s: s["trace"].append(["malloc", 1, 1, 1]),
    "is not an event": lambda s: s["trace"].append(["alloc", 1]),
    "refuses the settings": lambda s: s.update(settings="max_split_size_mb:2"),
    "is not a version of torch": lambda s: s.update(torch="main"),
    "the oldest is 2.1": lambda s: s.update(torch="1.13"),
    "memory_fraction is 1.5": lambda s: s.update(memory_fraction=1.5),
    "used_outside is more than total_memory": lambda s: s.update(used_outside=1 << 40),
    "total_memory is -1": lambda s: s.update(total_memory=-1),
    "'completion' is 'never'": lambda s: s.update(completion="never"),
    "answers to": lambda s: s["alloc_result"].pop(),
}


@pytest.mark.parametrize("sentence", BAD)
def test_a_stream_that_is_none_is_refused_in_a_sentence(
    sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = having("a")
    BAD[sentence](stream)
    path = write(tmp_path / "bad.jsonl", having("oom"), stream)
    good = write(tmp_path / "good.jsonl", having("a"))
    assert main([str(path), str(good)]) == 1
    out, err = capsys.readouterr()
    assert err.startswith(f"memtrace: {path}, line 2: ") and sentence in err
    assert err.count("\n") == 1
    assert out == "2 of 2 streams equal\n"  # those before it, and those of the other file


def cut(path: Path) -> None:
    write(path, *STREAMS)
    path.write_bytes(path.read_bytes()[:50_000])


@pytest.mark.parametrize(
    ("name", "make", "sentence"),
    [
        ("absent.jsonl", lambda path: None, "can't be read: No such file"),
        ("folder.jsonl", lambda path: path.mkdir(), "can't be read: Is a directory"),
        ("empty.jsonl", lambda path: path.touch(), "has no streams"),
        ("blank.jsonl", lambda path: path.write_text("\n\n"), "has no streams"),
        ("list.jsonl", lambda path: path.write_text("[]"), "a stream is a JSON object"),
        ("text.jsonl", lambda path: path.write_text("hello"), "line 1: this is not JSON"),
        ("deep.jsonl", lambda path: path.write_text("[" * 10**5), "line 1: this is not JSON"),
        ("bytes.jsonl", lambda path: path.write_bytes(b"\xff\xfe"), "line 1: this is not JSON"),
        ("plain.jsonl.gz", lambda path: path.write_text("{}"), "is not packed with gzip"),
        ("cut.jsonl.gz", cut, "is cut off or damaged after stream"),
    ],
)
def test_a_file_that_is_none_is_refused_in_a_sentence(
    name: str,
    make: Callable[[Path], object],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / name
    make(path)
    assert main([str(path)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("memtrace: ") and str(path) in err and sentence in err
    assert err.count("\n") == 1


def test_no_file_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "FILE" in capsys.readouterr().err


def _spots(data: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        yield data, key
        if isinstance(value, dict | list):
            yield from _spots(value)


@pytest.mark.parametrize("seed", range(100))
def test_broken_streams_are_refused_or_compared(seed: int) -> None:
    draw = random.Random(seed)
    stream = copy.deepcopy(draw.choice(STREAMS))
    stream["stats_after_op"] = {}
    for _ in range(draw.choice([1, 3])):
        holder, key = draw.choice(list(_spots(stream)))
        other = [None, True, -1, 0, 1 << 60, 1 << 64, 0.5, float("nan"), "", "oom", [], {}, [[]]]
        if draw.random() < 0.3:
            del holder[key]
        else:
            holder[key] = draw.choice(other)
    try:
        compare(Vector.parse(json.dumps(stream)))
    except VectorError as error:
        assert "\n" not in str(error)
