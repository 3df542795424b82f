"""What an allocator held when a recording began."""

import pytest

from memtrace.allocator.warm import Event, WarmOrder, warm_segments
from memtrace.trace.schema import Action

MIB = 1 << 20
BASE = 0x300000000
PAGE = 20 * MIB
REACH = 48 << 30


def mapped(address: int, size: int = PAGE, stream: int = 0) -> Event:
    return Action.SEGMENT_MAP, address, size, size, stream, 0


def block(address: int, size: int) -> Event:
    return Action.ALLOC, address, size, size, 0, 0


def test_segments_are_filled_with_blocks_and_what_is_free() -> None:
    events = [(Action.SEGMENT_ALLOC, BASE, PAGE, PAGE, 7, 0), block(BASE + 4 * MIB, 3 * MIB)]
    ((pieces, stream, pool, small, page),) = warm_segments(events, [], PAGE, REACH)
    assert (stream, pool, small, page) == (7, 0, False, 0)
    assert pieces == [
        (BASE, 4 * MIB, 0, "free"),
        (BASE + 4 * MIB, 3 * MIB, 3 * MIB, "allocated"),
        (BASE + 7 * MIB, 13 * MIB, 0, "free"),
    ]


def test_mapped_ranges_of_one_owner_are_one_expandable_segment() -> None:
    events = [mapped(BASE), mapped(BASE + 3 * PAGE), mapped(BASE + PAGE), block(BASE, 19 * MIB)]
    ((pieces, *_, page),) = warm_segments(events, [], PAGE, REACH)
    assert page == PAGE
    assert [(address - BASE, state) for address, _, _, state in pieces] == [
        (0, "allocated"),
        (19 * MIB, "free"),
        (2 * PAGE, "unmapped"),
        (3 * PAGE, "free"),
        (4 * PAGE, "unmapped"),
    ]


@pytest.mark.parametrize(
    ("later", "begins"),
    [
        ([], 2 * PAGE),
        ([mapped(BASE), mapped(BASE + PAGE)], 0),
        ([mapped(BASE + PAGE)], PAGE),
        ([mapped(BASE, stream=5)], 2 * PAGE),  # another stream's
        ([mapped(BASE + MIB)], 2 * PAGE),  # no page of this segment
        ([mapped(BASE - REACH)], 2 * PAGE),  # too far for one segment
    ],
)
def test_pages_that_were_given_back_tell_where_a_segment_begins(
    later: list[Event], begins: int
) -> None:
    events = [mapped(BASE + 2 * PAGE), block(BASE + 2 * PAGE, 3 * MIB)]
    ((pieces, *_),) = warm_segments(events, later, PAGE, REACH)
    assert pieces[0][0] == BASE + begins
    assert (pieces[0][3] == "unmapped") == (begins < 2 * PAGE)


def test_which_segment_is_older_is_learnt_once() -> None:
    events = [(Action.SEGMENT_ALLOC, BASE + n * PAGE, PAGE, PAGE, 0, 0) for n in range(3)]
    segments = warm_segments(events, [], PAGE, REACH)
    order = WarmOrder()
    assert [one[0][0][0] for one in order.sort(segments)] == [BASE + n * PAGE for n in range(3)]
    assert order.learn(older=BASE + 2 * PAGE + 5, younger=BASE)
    starts = [one[0][0][0] for one in order.sort(segments)]
    assert starts.index(BASE + 2 * PAGE) < starts.index(BASE)
    assert not order.learn(older=BASE + 2 * PAGE, younger=BASE)  # known
    assert not order.learn(older=BASE, younger=BASE + 2 * PAGE)  # a contradiction
    assert not order.learn(older=BASE, younger=BASE + 9 * PAGE)  # no segment
    assert order.learnt >= 1
