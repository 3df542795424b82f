"""PyTorch's out-of-memory messages in any text: what they say, and what follows from it."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrace.allocator.oom import Failure
from memtrace.analysis.failure import Kind
from memtrace.errors import MemtraceError
from memtrace.interchange.oom_message import (
    Form,
    OomMessage,
    Rounded,
    conclude,
    find_messages,
    notes,
    read_log,
    remedies,
)

MiB, GiB = 1 << 20, 1 << 30

LONG = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 23.99 GiB of "
    "which 1.50 GiB is free. Process 4711 has 3.00 GiB memory in use. Including non-PyTorch "
    "memory, this process has 19.40 GiB memory in use. 20.00 GiB allowed; Of the allocated memory "
    "18.00 GiB is allocated by PyTorch, with 6.00 GiB allocated in private pools (e.g., CUDA "
    "Graphs), and 512.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated "
    "memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)


def only(text: str) -> OomMessage:
    (message,) = find_messages(text)
    return message


def texts(message: OomMessage) -> dict[str, str]:
    names = ("requested", "total", "free", "allocated", "unallocated", "private", "allowed")
    sizes = {name: getattr(message, name) for name in (*names, "process")}
    return {name: size.text for name, size in sizes.items() if size is not None}


def test_everything_that_a_message_of_torch_2_says() -> None:
    message = only(LONG)
    assert (message.form, message.device, message.rank, message.line) == (Form.LONG, 1, None, 1)
    assert texts(message) == {
        "requested": "2.00 GiB",
        "total": "23.99 GiB",
        "free": "1.50 GiB",
        "allocated": "18.00 GiB - 6.00 GiB",
        "unallocated": "512.00 MiB",
        "private": "6.00 GiB",
        "allowed": "20.00 GiB",
        "process": "19.40 GiB",
    }
    assert [(pid, size.text) for pid, size in message.others] == [(4711, "3.00 GiB")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "(GPU 0; 10.92 GiB total capacity; 8.57 MiB already allocated; 9.28 GiB free; 4.68 MiB "
            "cached)",
            {"allocated": "8.57 MiB", "unallocated": "4.68 MiB"},
        ),
        (
            "(GPU 0; 15.90 GiB total capacity; 14.98 GiB already allocated; 9.75 MiB free; 15.02 "
            "GiB reserved in total by PyTorch)",
            {"allocated": "14.98 GiB", "unallocated": "15.02 GiB - 14.98 GiB"},
        ),
        (
            "(GPU 0; 8.00 GiB total capacity; 6.11 GiB already allocated; 0 bytes free; 6.40 GiB "
            "allowed; 6.30 GiB reserved in total by PyTorch) If reserved memory is >> allocated",
            {"free": "0 bytes", "allowed": "6.40 GiB"},
        ),
    ],
)
def test_messages_of_torch_1(text: str, expected: dict[str, str]) -> None:
    message = only(f"RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB {text}")
    assert message.form is Form.SHORT
    assert expected.items() <= texts(message).items()


@pytest.mark.parametrize(
    "text",
    [
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a "
        "total capacty of 6.00 GiB of which 0 bytes is free. Of the allocated memory 2.93 GiB is "
        "allocated by PyTorch, and 2.30 GiB is reserved by PyTorch but unallocated.",
        "HIP out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total capacity of 6.00 GiB of "
        "which 0 bytes is free. Of the allocated memory 2.93 GiB is allocated by PyTorch, and "
        "2.30 GiB is reserved by PyTorch but unallocated.",
    ],
)
def test_the_spellings_of_torch_2(text: str) -> None:
    assert texts(only(text))["unallocated"] == "2.30 GiB"


def test_other_allocators_and_settings() -> None:
    rejected = only(Failure(20 * MiB, 20 * MiB, GiB, 0, None, 0, 0, 0, rejected=True).message())
    assert (rejected.form, texts(rejected)) == (Form.REJECTED, {"requested": "20.00 MiB"})
    asynchronous = only(
        "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of "
        "memory)\nCurrently allocated     : 5.02 GiB\nRequested               : 81.00 MiB\nDevice "
        "limit            : 5.93 GiB\nFree (according to CUDA): 0 bytes\nPyTorch limit (set by "
        "user-supplied memory fraction)\n                        : 17179869184.00 GiB"
    )
    assert asynchronous.form is Form.ASYNC
    assert texts(asynchronous) == {
        "requested": "81.00 MiB",
        "total": "5.93 GiB",
        "free": "0 bytes",
        "allocated": "5.02 GiB",
    }
    assert only("RuntimeError: CUDA error: out of memory").form is Form.BARE


def test_what_logs_do_to_messages() -> None:
    words = LONG.split(" ")
    wrapped = " ".join(words[:20]) + "\n[rank2]:     " + " ".join(words[20:])
    log = f"step 1\n\x1b[31m[rank2]: torch.OutOfMemoryError: {wrapped}\x1b[0m\n{LONG}\n{LONG}\n"
    first, second = find_messages(log)
    assert texts(first) == texts(second)
    assert (first.line, first.rank, first.times) == (2, 2, 1)
    assert (second.line, second.rank, second.times) == (4, None, 2)


@pytest.mark.parametrize("cut", range(0, len(LONG), 7))
def test_a_message_that_breaks_off_claims_nothing_more(cut: int) -> None:
    for message in find_messages(LONG[:cut]):
        found = conclude(message)
        assert found.kind in (None, conclude(only(LONG)).kind, Kind.FRAGMENTED, Kind.PRIVATE)
        assert remedies(message, found)


def test_sizes_are_ranges() -> None:
    size = Rounded.parse("20.00 MiB")
    assert size.low == pytest.approx(19.995 * MiB, abs=1)
    assert size.high == pytest.approx(20.005 * MiB, abs=1)
    assert Rounded.parse("512 bytes") == Rounded("512 bytes", 512, 512)


# -- conclusions -----------------------------------------------------------------------------------

SIZES = st.integers(0, 30 * GiB).map(lambda size: size // 512 * 512)


@given(SIZES.filter(bool), SIZES, SIZES, SIZES, SIZES, SIZES, st.booleans())
def test_a_sure_conclusion_is_right(
    wanted: int, free: int, allocated: int, rest: int, private: int, outside: int, limited: bool
) -> None:
    reserved = allocated + rest + private
    total = free + reserved + outside
    allowed = reserved + wanted // 2 if limited and free >= wanted else None
    failure = Failure(wanted, wanted, total, free, allowed, allocated, reserved, private)
    found = conclude(only(failure.message()))
    if not found.sure:
        return
    if found.kind is Kind.EXHAUSTED:
        assert free + rest + private < wanted or wanted > total
    elif found.kind is Kind.FRACTION:
        assert allowed is not None and free >= wanted
    else:
        assert found.kind is Kind.PRIVATE
        assert free + rest < wanted <= free + rest + private


def state(free: int, rest: int, private: int = 0, allowed: int | None = None) -> OomMessage:
    """A message about 600 MiB that a device of 8 GiB has no room for."""
    reserved = 6 * GiB + rest + private
    failure = Failure(600 * MiB, 600 * MiB, 8 * GiB, free, allowed, 6 * GiB, reserved, private)
    return only(failure.message())


@pytest.mark.parametrize(
    ("message", "kind", "sure"),
    [
        (state(100 * MiB, 900 * MiB), Kind.FRAGMENTED, False),
        (state(100 * MiB, 90 * MiB), Kind.EXHAUSTED, True),
        (state(900 * MiB, 0, allowed=6 * GiB + 300 * MiB), Kind.FRACTION, True),
        (state(900 * MiB, 0), Kind.UNEXPLAINED, False),
        (state(100 * MiB, 90 * MiB, 900 * MiB), Kind.PRIVATE, True),
        (state(100 * MiB, 700 * MiB, 900 * MiB), Kind.PRIVATE, False),
        (state(100 * MiB, 500 * MiB), None, False),
        (only("CUDA error: out of memory"), None, False),
    ],
)
def test_conclusions(message: OomMessage, kind: Kind | None, sure: bool) -> None:
    found = conclude(message)
    assert (found.kind, found.sure) == (kind, sure)
    assert found.unknown and found.words and remedies(message, found)


def test_fragmentation_may_be_a_block_that_waits() -> None:
    found = conclude(state(100 * MiB, 900 * MiB))
    assert any("waiting for one" in text for text in found.unknown)


CONTAINED = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.99 GiB of "
    "which 1.50 GiB is free. {} Of the allocated memory 18.00 GiB is allocated by PyTorch, and "
    "512.00 MiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("processes", "itself", "others"),
    [
        ({4711: "22.48 GiB"}, "22.48 GiB", []),
        ({4711: "19.40 GiB", 4712: "3.00 GiB"}, "19.40 GiB", [4712]),
        ({4711: "3.00 GiB"}, None, [4711]),  # a driver that hides the process itself
        ({}, None, []),
    ],
)
def test_in_a_container_a_process_names_itself_like_another(
    processes: dict[int, str], itself: str | None, others: list[int]
) -> None:
    named = " ".join(f"Process {pid} has {size} memory in use." for pid, size in processes.items())
    message = only(CONTAINED.format(named))
    assert texts(message).get("process") == itself
    assert [pid for pid, _ in message.others] == others
    stopping = [text for text in remedies(message, conclude(message)) if "other processes" in text]
    assert bool(stopping) is bool(others)


def test_who_else_holds_memory() -> None:
    found = notes(only(LONG))
    assert "Process 4711 holds 3.00 GiB." in found
    assert any(
        text.endswith("of this process are not PyTorch's: the CUDA context, NCCL, other libraries.")
        for text in found
    )
    lent = only(
        "CUDA out of memory. Tried to allocate 10.73 GiB (GPU 0; 8.00 GiB total capacity; 17.20 "
        "GiB already allocated; 0 bytes free; 19.15 GiB reserved in total by PyTorch)"
    )
    assert notes(lent)[0].startswith("PyTorch holds more than the card has")
    small = only(Failure(MiB, 20 * MiB, GiB, 0, None, GiB, GiB, 0).message())
    assert notes(small) == [
        "20.00 MiB is what the allocator takes for any block of 1 to 10 MiB: the tensor is smaller."
    ]


# -- files -----------------------------------------------------------------------------------------


def test_a_log_in_utf_16_and_a_long_one(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(f"x\r\n{LONG}\r\n", encoding="utf-16")
    (message,) = read_log(str(log))
    assert message.line == 2
    log.write_text("step\n" * 200_000 + LONG + "\n")
    (message,) = read_log(str(log))
    assert message.line == 200_001


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (b"all is well\n", "has no out-of-memory message of PyTorch in it"),
        (b"\x80\x04\0\0garbage\xff\n", "is no text: memtrace explain reads runs and logs"),
    ],
)
def test_files_without_a_message_are_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    log = tmp_path / "log.txt"
    log.write_bytes(content)
    with pytest.raises(MemtraceError, match=problem):
        read_log(str(log))


@pytest.mark.parametrize("seed", range(200))
def test_mutated_messages_crash_nothing(seed: int) -> None:
    draw = random.Random(seed)
    text = list(LONG)
    for _ in range(draw.randrange(1, 30)):
        place = draw.randrange(len(text))
        text[place] = draw.choice(["9", ".", " ", "\n", "", "\x1b[", "GiB", "\0", "é"])
    for message in find_messages("".join(text)):
        assert remedies(message, conclude(message))
        notes(message)
