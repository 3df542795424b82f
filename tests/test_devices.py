"""The catalogue of cards."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from memtrace.devices import MAX_DEVICES, catalogue, choose
from memtrace.errors import MemtraceError

MINE = """
[devices.mine]
name = "My card"
total = 8_000_000_000
capability = "8.6"
processors = 20
l2_cache = 3_000_000
"""


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user's catalogue would be."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "memtrace" / "devices.toml"
    path.parent.mkdir()
    return path


def test_every_figure_has_a_source(users: Path) -> None:
    for device in catalogue().values():
        assert len(device.sources) >= 11
        for name, source in device.sources.items():
            # A key that isn't under [sources] would come through as one word.
            assert source == "unknown" or " " in source, (device.key, name)
            assert (source == "unknown") == (getattr(device, name) is None)


@pytest.mark.parametrize(
    ("text", "expected"),
    {
        "a100-40g": ["a100-40g"],
        "2×a100-40g": ["a100-40g"] * 2,
        "2xa100-40g": ["a100-40g"] * 2,
        "h100-80g, 2 × l4-24g": ["h100-80g", "l4-24g", "l4-24g"],
    }.items(),
)
def test_cards_are_chosen_by_name_and_number(users: Path, text: str, expected: list[str]) -> None:
    assert [device.key for device in choose(text)] == expected


@pytest.mark.parametrize("text", ["", "a100", "×a100-40g", "2*a100-40g", "a100-40g,,l4-24g"])
def test_an_unknown_card_is_refused(users: Path, text: str) -> None:
    with pytest.raises(MemtraceError, match="no known card; known are a100-40g"):
        choose(text)


@pytest.mark.parametrize("count", [0, MAX_DEVICES + 1, 10**8])
def test_no_card_and_too_many_are_refused(users: Path, count: int) -> None:
    with pytest.raises(MemtraceError, match="no card or for more than"):
        choose(f"{count}×l4-24g")


def test_users_add_cards(users: Path) -> None:
    users.write_text(MINE)
    [mine] = choose("mine")
    assert (mine.name, mine.total, mine.capability) == ("My card", 8_000_000_000, (8, 6))
    assert (mine.context, mine.threads_per_processor) == (None, 1536)
    assert mine.sources["total"] == "the user's catalogue"
    assert "a100-40g" in catalogue()


def test_users_describe_a_capability_that_we_dont_know(users: Path) -> None:
    limits = """
[architectures."12.0"]
shared_per_block = 101_376
shared_per_processor = 102_400
threads_per_processor = 1536
blocks_per_processor = 24
cublas_workspace = 33_554_432
"""
    users.write_text(MINE.replace("8.6", "12.0") + limits)
    assert choose("mine")[0].cublas_workspace == 33_554_432


@pytest.mark.parametrize(
    ("text", "why"),
    {
        "[devices.mine": "is not a TOML file",
        "[cards.mine]": "'cards' is not expected",
        "devices = 1": "'devices' is not expected",
        "[devices]\nmine = 1": "device 'mine' is not a table",
        '[devices."my card"]': "a name is made of letters",
        MINE.replace("total", "memory"): "device 'mine' lacks total",
        MINE + "clock = 5": "has clock, which mean nothing there",
        MINE.replace("8_000_000_000", "'8 GB'"): "total can't be '8 GB'",
        MINE.replace("8_000_000_000", "-1"): "total can't be -1",
        MINE.replace("8_000_000_000", "true"): "total can't be True",
        MINE.replace("8_000_000_000", "'unknown'"): "total can't be 'unknown'",
        MINE.replace("My card", "My|card"): "name can't be 'My|card'",
        MINE.replace("8.6", "8"): "capability can't be '8'",
        MINE.replace("8.6", "12.0"): "nothing is known of capability 12.0",
        MINE + "context = 8_000_000_000": "its context takes all of its memory or more",
        MINE + "pool = 9_000_000_000": "its pool takes all of its memory or more",
    }.items(),
)
def test_a_wrong_catalogue_is_refused_in_one_sentence(users: Path, text: str, why: str) -> None:
    users.write_text(text)
    with pytest.raises(MemtraceError) as refused:
        catalogue()
    assert why in str(refused.value)
    assert str(users) in str(refused.value)
    assert "\n" not in str(refused.value)


class TestCommand:
    def run(self, *options: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "memtrace", "devices", *options],
            capture_output=True,
            text=True,
            timeout=60,
        )

    def test_the_catalogue_is_listed(self, users: Path) -> None:
        users.write_text(MINE)
        done = self.run()
        assert done.returncode == 0, done.stderr
        rows = {line.split()[0]: line for line in done.stdout.splitlines()}
        assert "39.39 GiB" in rows["a100-40g"]
        assert rows["mine"].endswith("unknown")

    def test_json_has_every_figure_and_source(self, users: Path) -> None:
        document = json.loads(self.run("--json").stdout)
        first = document["devices"][0]
        assert (document["schema"], first["key"], first["total"]) == (1, "a100-40g", 42_298_834_944)
        assert "deviceQuery" in first["sources"]["total"]

    def test_a_wrong_catalogue_is_one_sentence(self, users: Path) -> None:
        users.write_text("[cards]")
        done = self.run()
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.count("\n") == 1
