"""Slopes over requests, and what they say."""

from math import inf

import numpy as np
import pytest

from memtrace.analysis.stability import FEWEST, Stability, slope


def test_a_line_is_its_own_slope() -> None:
    found = slope(np.arange(40) * 65536)
    assert (found.value, found.low, found.high) == (65536, 65536, 65536)
    assert found.judge(65535) is Stability.GROWING
    assert found.judge(65536) is Stability.PLATEAU


def test_a_constant_is_a_plateau() -> None:
    found = slope([7] * 5)
    assert (found.value, found.low, found.high) == (0, 0, 0)
    assert found.judge(0) is Stability.PLATEAU


def test_outliers_change_little() -> None:
    values = np.arange(40) * 1000
    values[[3, 17, 29]] += 1 << 30
    found = slope(values)
    assert found.value == 1000
    assert found.judge(10_000) is Stability.PLATEAU


@pytest.mark.parametrize("cycle", [(0,), (10_000, 70_000, 30_000, 90_000, 20_000, 50_000)])
def test_the_interval_holds_the_slope(cycle: tuple[int, ...]) -> None:
    """95 of 100 times, among noise and between requests of unlike lengths; 100 is 2.2 sigma off."""
    lengths = [cycle[n % len(cycle)] for n in range(60)]
    inside = 0
    for seed in range(200):
        noise = np.random.default_rng(seed).normal(0, 2000, 60)
        found = slope(300 * np.arange(60) + noise + lengths, groups=lengths)
        inside += found.low <= 300 <= found.high
    assert 180 <= inside <= 199


def test_groups_uncover_a_slope_that_lengths_hide() -> None:
    """A leak of 64 KiB a request, where lengths differ by hundreds of MiB."""
    lengths = [(n * 7919) % 6 * (100 << 20) for n in range(40)]
    values = 65536 * np.arange(40) + lengths
    assert slope(values).judge(16384) is Stability.UNDECIDED
    assert slope(values, groups=lengths).judge(16384) is Stability.GROWING


@pytest.mark.parametrize("values", [[], [1], [1, 2], [1, 2, 3, 4]])
def test_few_points_decide_nothing(values: list[int]) -> None:
    found = slope(values)
    assert found.judge(1 << 40) is Stability.UNDECIDED
    assert found.wanting(1 << 40) == FEWEST - found.points


def test_unlike_groups_leave_nothing_to_compare() -> None:
    found = slope([1, 2, 3, 4, 5, 6], groups=[1, 2, 3, 4, 5, 6])
    assert (found.low, found.high, found.points) == (-inf, inf, 0)
    assert found.judge(0) is Stability.UNDECIDED


def test_about_as_many_more_as_are_wanting_decide() -> None:
    """The interval narrows as n^-1.5; how far off the slope is, is itself an estimate."""
    decided = tried = 0
    for seed in range(40):
        noise = np.random.default_rng(seed).normal(0, 20_000, 4000)
        more = slope(noise[:20]).wanting(500)
        if more and more < 1000:
            tried += 1
            decided += slope(noise[: 20 + 2 * more]).judge(500) is not Stability.UNDECIDED
    assert tried >= 10
    assert decided >= 0.5 * tried
    assert slope(np.arange(40)).wanting(500) == 0
    assert slope([1, 1, 1, 0, 1, 2, 1, 1]).wanting(0) is None
