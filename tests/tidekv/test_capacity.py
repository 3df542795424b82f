"""The search for the longest prompt, on allocators that are simple functions of it."""

from collections.abc import Callable

import pytest

from tidekv.plans.capacity import STEP, Longest, Probe, search

MiB = 1 << 20
MODEL, TOKEN = 1000 * MiB, 100_000  # bytes


def longest(
    limit: int, *, waste: Callable[[int], int] = lambda prompt: 0, last: int = 1 << 20
) -> Longest:
    """Search where prompts up to ``limit`` tokens fit, and ``waste`` is reserved in vain."""
    room = MODEL + limit * TOKEN

    def probe(prompt: int) -> Probe:
        allocated = MODEL + prompt * TOKEN
        reserved = min(allocated + waste(prompt), room)
        return Probe(prompt, allocated <= room, min(allocated, room), reserved)

    return search(probe, room=room, first=8 * STEP, last=last)


@pytest.mark.parametrize("limit", [STEP, 5000, 8 * STEP, 12_345, 16 * STEP, 65_535, 65_536, 70_000])
@pytest.mark.parametrize("share", [0.0, 0.2])
def test_the_answer_fits_and_a_step_more_does_not(limit: int, share: float) -> None:
    found = longest(limit, waste=lambda prompt: int(share * prompt * TOKEN))
    tried = {one.prompt: one.fits for one in found.probes}
    assert found.prompt == limit // STEP * STEP
    assert found.shorter_than == found.prompt + STEP
    assert tried[found.prompt]
    assert not tried[found.shorter_than]
    assert len(found.probes) == len(tried) <= 9


def test_a_long_answer_is_exact_to_half_a_percent_in_few_probes() -> None:
    found = longest(900_000, waste=lambda prompt: 300 * MiB)
    assert found.shorter_than is not None
    assert found.prompt <= 900_000 < found.shorter_than
    assert found.shorter_than - found.prompt <= 900_000 / 200
    assert len(found.probes) <= 5


def test_nothing_fits() -> None:
    found = longest(100)
    assert (found.prompt, found.shorter_than) == (0, STEP)


def test_the_longest_that_was_to_be_tried_fits() -> None:
    found = longest(1 << 19, last=1 << 17)
    assert (found.prompt, found.shorter_than) == (1 << 17, None)
    assert found.probes[-1].prompt == 1 << 17
    assert len(found.probes) == 3


def test_peaks_that_do_not_grow_have_no_limit() -> None:
    found = search(lambda prompt: Probe(prompt, True, 1, 1), room=2, first=STEP, last=32 * STEP)
    assert (found.prompt, found.shorter_than) == (32 * STEP, None)
