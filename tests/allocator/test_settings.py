import pytest

from memtrace.allocator.settings import UNLIMITED, Settings

MIB = 1 << 20


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
