"""Broken snapshots: refused in one sentence, or imported with sums that hold."""

import copy
import json
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memtrace.errors import MemtraceError
from memtrace.interchange.exporter import export_snapshot
from memtrace.interchange.importer import import_snapshot
from memtrace.interchange.snapshot import OURS
from memtrace.trace.reader import open_trace
from tests.interchange.runs import assert_consistent
from tests.interchange.snapshots import DATA, MIB, load

RICH = DATA / "rich_oom_torch2.15.0.pickle"

VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 512, 1 << 60, (1 << 62) - 1, 1 << 62, 1 << 64, 1.5, float("nan")),
    *("", "x", "alloc", "free_completed", "segment_free", "segment_unmap", "inactive", "\ud800"),
    *("Act", "memtrace:Act|layer=third", "memtrace>Act|layer=", "memtrace:Act|layer=3"),
    *([], {}, (0, 1), [0, 1], [[]], b"bytes"),
]
ACTIONS = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free")
ACTIONS += ("segment_map", "segment_unmap", "oom", "annotate", "snapshot")


def _spots(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a value in a structure: what holds it, and under which key."""
    pairs = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in pairs:
        yield data, key
        if isinstance(value, (dict, list)):
            yield from _spots(value)


def values(draw: random.Random, data: Any) -> bytes:
    """Values are missing, replaced, shifted, doubled."""
    for _ in range(draw.choice([1, 1, 3, 10])):
        holder, key = draw.choice(list(_spots(data)))
        value = holder[key]
        kind = draw.randrange(4)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(value, int):
            holder[key] = value + draw.choice([-512, 512, 1, MIB, -MIB])
        elif kind == 2 and isinstance(value, list) and value:
            value.insert(draw.randrange(len(value)), draw.choice(value))
        else:
            holder[key] = draw.choice(VALUES)
    return pickle.dumps(data, protocol=draw.randrange(2, 6))


def history(draw: random.Random, data: Any) -> bytes:
    """The form is right and the history isn't: entries are missing, twice, or other ones."""
    trace = data["device_traces"][0]
    for _ in range(draw.choice([1, 3, 20, 60])):
        row = draw.randrange(len(trace))
        kind = draw.randrange(5)
        if kind == 0 and len(trace) > 2:
            del trace[row]
        elif kind == 1:
            trace.insert(draw.randrange(len(trace)), dict(draw.choice(trace)))
        elif kind == 2:
            trace[row] |= {"action": draw.choice(ACTIONS), "device_free": 1}
            trace[row].setdefault("addr", 0)
        elif kind == 3:
            trace[row]["addr"] = draw.choice(trace).get("addr", 0) + draw.choice([0, 512, MIB])
        else:
            trace[row]["size"] = draw.choice([0, 1, trace[row]["size"] * 2, 1 << 59])
        other = draw.choice(data["segments"])
        if draw.random() < 0.2:
            other |= {"is_expandable": draw.random() < 0.5, "stream": draw.randrange(2)}
    return pickle.dumps(data)


def raw(draw: random.Random, data: Any) -> bytes:
    """Bytes of the file are gone, new or others."""
    whole = bytearray(RICH.read_bytes())
    for _ in range(draw.choice([1, 2, 10])):
        place = draw.randrange(len(whole))
        kind = draw.randrange(4)
        if kind == 0:
            del whole[place]
        elif kind == 1:
            whole.insert(place, draw.randrange(256))
        elif kind == 2:
            whole[place] = draw.randrange(256)
        else:
            del whole[draw.randrange(len(whole)) :]
            break
    return bytes(whole)


def added(draw: random.Random, data: Any) -> bytes:
    """What our export added says something else."""
    said = json.loads(data.get(OURS, "{}"))
    for _ in range(draw.choice([1, 2, 5])):
        spots = list(_spots(said))
        if spots:
            holder, key = draw.choice(spots)
            holder[key] = draw.choice([one for one in VALUES if not isinstance(one, bytes)])
    return pickle.dumps(data | {OURS: json.dumps(said)} if said else data)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """A snapshot of PyTorch's, and one that we exported."""
    folder = tmp_path_factory.mktemp("originals")
    import_snapshot(RICH, folder / "run")
    made = export_snapshot(open_trace(folder / "run"), folder / "ours.pickle")
    return [load(RICH), load(made.file)]


@pytest.mark.parametrize("mutate", [values, history, raw, added])
@pytest.mark.parametrize("seed", range(10))
def test_it_is_refused_or_its_sums_hold(
    tmp_path: Path,
    originals: list[Any],
    mutate: Callable[[random.Random, Any], bytes],
    seed: int,
) -> None:
    draw = random.Random(seed)
    file = tmp_path / "mutated.pickle"
    for number in range(10):
        file.write_bytes(mutate(draw, copy.deepcopy(originals[number % 2])))
        run = tmp_path / str(number)
        try:
            import_snapshot(file, run)
        except MemtraceError as refused:
            assert str(file) in str(refused) and "\n" not in str(refused)
            assert not run.exists() and not list(tmp_path.glob(".*"))
        else:
            assert_consistent(run)
