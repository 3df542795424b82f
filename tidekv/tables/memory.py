"""The paper's memory results beside ours: ``published.toml`` has the figures, virtual cards ours.

A row needs one prefill a column or two; prefills of one card, allocator and model share a process
(:mod:`tidekv.tables.measuring`). No torch here.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import asdict, dataclass, fields
from os import environ
from pathlib import Path
from typing import Any

from memtrace.allocator.settings import environment_of
from memtrace.virtual_gpu.launch import environment
from tidekv.errors import TidekvError, check_choice
from tidekv.plans import planning
from tidekv.plans.cards import card_of
from tidekv.plans.command import add_plan
from tidekv.tables.measuring import Measured

_PUBLISHED = Path(__file__).with_name("published.toml")
#: Allocated figures are to be within this share of the paper's.
WITHIN = 0.002
#: The allocator whose memory the driver pools.
_ASYNC = "backend:cudaMallocAsync"
#: Quantities that are exact; reserved bytes depend on more than the paper says.
_EXACT = ("allocated", "steady", "above", "cache")


@dataclass(frozen=True)
class Setting:
    """A prompt on a card: what methods share, as options of ``tidekv plan`` of these names.

    ``allocator``: empty for PyTorch's defaults; ``piece``: of ``--piece-rows``.
    """

    prompt: int
    device: str
    attention: str = "fa2"
    chunk: int = 2048
    piece: int | None = None
    selector: str = "snapkv"
    allocator: str = ""
    model: str = "llama-3.1-8b"

    def words(self) -> list[str]:
        """The options."""
        found = ["--model", self.model, "--budget", "4096", "--chunk-size", str(self.chunk)]
        if self.piece is not None:
            found += ["--piece-rows", str(self.piece)]
        if self.selector != "snapkv":
            found += ["--selector", self.selector]
        found += ["--attention", self.attention, "--prompt", str(self.prompt)]
        found += ["--device", self.device]
        return [*found, "--allocator", self.allocator] if self.allocator else found


@dataclass(frozen=True)
class Case:
    """One prefill: a method of ``tidekv plan --compare`` in a setting."""

    setting: Setting
    method: str

    def options(self) -> list[str]:
        """What of it is an option of ``tidekv run``."""
        parser = argparse.ArgumentParser()
        add_plan(parser.add_subparsers())
        given = parser.parse_args(["plan", *self.setting.words()])
        return planning.options(planning.named(given, self.method))


#: What was measured of each prefill that was run.
Found = Mapping[Case, Measured]


@dataclass(frozen=True)
class Row:
    """One figure of the paper's; ``published.toml`` says what each attribute is.

    ``paper`` and the values of the other columns are in GiB, in percent (``saves``), or whether it
    fits (``verdict``).
    """

    setting: Setting
    method: str
    quantity: str
    saves: bool = False
    paper: float | bool | None = None
    process: bool = False

    @property
    def methods(self) -> list[str]:
        """What it needs, by name."""
        tidekv = ["published", "tidekv"] if self.method == "tidekv" else [self.method]
        return ["snapkv", *tidekv] if self.saves else tidekv

    def cases(self) -> list[Case]:
        return [Case(self.setting, method) for method in self.methods]

    def as_published(self, found: Found) -> float | bool | None:
        """With what the authors' implementation holds; None: it wasn't run, or doesn't fit."""
        return self._value(found, "published" if self.method == "tidekv" else self.method)

    def ours(self, found: Found) -> float | bool | None:
        """The same of the tight schedule; baselines have no other version."""
        return self._value(found, self.method)

    def difference(self, found: Found) -> float | None:
        """``as published`` less the paper's; None: one of them isn't known or isn't comparable."""
        here = self.as_published(found)
        if self.process or self.quantity == "verdict" or self.paper is None or here is None:
            return None
        return here - self.paper

    def agrees(self, found: Found) -> bool | None:
        """Whether a verdict is the paper's, or an allocated figure within :data:`WITHIN` of it.

        Of a saving it is what remains that is compared. None: there is nothing to judge.
        """
        here, difference = self.as_published(found), self.difference(found)
        if self.quantity == "verdict":
            return None if self.paper is None or here is None else here == self.paper
        if difference is None or self.paper is None or self.quantity not in _EXACT:
            return None
        return abs(difference) <= WITHIN * (100 - self.paper if self.saves else self.paper)

    def left(self, found: Found) -> int | None:
        """Bytes of the card beside what ``as published`` reserves, less a context that is known."""
        one = found.get(Case(self.setting, self.methods[0]))
        if self.saves or one is None or not one.fits:
            return None
        card = card_of(self.setting.device)
        room = card.total - (card.context or 0)
        if self.setting.allocator == _ASYNC and card.pool is not None:
            room = min(room, card.pool)
        return room - one.reserved_peak

    def _value(self, found: Found, method: str) -> float | bool | None:
        one = found.get(Case(self.setting, method))
        if self.quantity == "verdict":
            return None if one is None else one.fits
        here = _bytes(one, self.quantity)
        if not self.saves:
            return None if here is None else here / 2**30
        base = _bytes(found.get(Case(self.setting, "snapkv")), self.quantity)
        return None if here is None or base is None else 100 * (1 - here / base)


def command(setting: Setting, methods: Iterable[str]) -> str:
    """What plans a setting's prefills, each with its report."""
    return " ".join(["tidekv", "plan", *setting.words(), "--compare", ",".join(methods)])


def _bytes(one: Measured | None, quantity: str) -> int | None:
    if one is None or one.steady is None:
        return None
    return {
        "allocated": one.allocated_peak,
        "reserved": one.reserved_peak,
        "steady": one.steady,
        "above": one.allocated_peak - one.steady,
        "cache": one.cache,
    }[quantity]


@dataclass(frozen=True)
class Table:
    """Rows that belong together; ``note``: what has to be known of them."""

    name: str
    title: str
    note: str
    rows: tuple[Row, ...]


def tables(names: Iterable[str] = ()) -> list[Table]:
    """Those of these names, in the order of the file; none given: all.

    Raises:
        InfeasibleError: there is none of a name.
    """
    with _PUBLISHED.open("rb") as file:
        known = tomllib.load(file)
    wanted = list(names) or list(known)
    for name in wanted:
        check_choice("table", name, known)
    return [_table(name, body) for name, body in known.items() if name in wanted]


def _table(name: str, body: Mapping[str, Any]) -> Table:
    own = {one.name for one in fields(Setting)}
    shared = {key: value for key, value in body.items() if key in own}

    def row(given: Mapping[str, Any]) -> Row:
        setting = shared | {key: value for key, value in given.items() if key in own}
        rest = {key: value for key, value in given.items() if key not in own}
        return Row(Setting(**setting), **rest)

    rows = tuple(row(given) for given in body["rows"])
    return Table(name, body["title"], body.get("note", ""), rows)


def cases_of(wanted: Iterable[Table]) -> list[Case]:
    """What they need, once each, those that share a process beside each other."""
    cases = dict.fromkeys(case for table in wanted for row in table.rows for case in row.cases())
    places = list(dict.fromkeys(_place(case) for case in cases))
    return sorted(cases, key=lambda case: places.index(_place(case)))


def _place(case: Case) -> tuple[str, str, str]:
    """What a process has one of."""
    return case.setting.device, case.setting.allocator, case.setting.model


def measure(
    cases: Iterable[Case], found: MutableMapping[Case, Measured], done: Callable[[], object]
) -> None:
    """Run prefills and put what each took into ``found``; an interruption leaves what is there.

    Args:
        done: called after each.

    Raises:
        TidekvError: a process failed.
        MemtraceError: no virtual card can be had.
    """
    by_place: dict[tuple[str, str, str], list[Case]] = {}
    for case in cases:
        by_place.setdefault(_place(case), []).append(case)
    for (device, allocator, _), together in by_place.items():
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        added = environment([device]) | environment_of(allocator) | quiet
        for line, case in zip(_measured(together, environ | added), together, strict=True):
            found[case] = Measured(**json.loads(line))
            done()


def _measured(cases: list[Case], variables: Mapping[str, str]) -> Iterable[str]:
    """A line of each, from one process.

    Raises:
        TidekvError: it failed, and says why.
    """
    command = [sys.executable, "-m", "tidekv.tables.measuring"]
    jobs = json.dumps([(case.options(), case.setting.prompt) for case in cases])
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as said,
        subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        try:
            with process.stdin:
                process.stdin.write(jobs)
            yield from process.stdout
            failed = process.wait() != 0
        finally:
            process.kill()
        if failed:
            said.seek(0)
            last = said.read().strip().splitlines()[-1:]
            words = (last or ["A process ended without a word."])[0]
            raise TidekvError(words.removeprefix("tidekv: "))


def as_json(wanted: Iterable[Table], found: Found) -> dict[str, Any]:
    """Every row, and every prefill."""
    return {
        "tables": [
            {
                "name": table.name,
                "title": table.title,
                "note": table.note,
                "rows": [
                    {
                        "method": row.method,
                        "prompt": row.setting.prompt,
                        "quantity": row.quantity,
                        "saves": row.saves,
                        "paper": row.paper,
                        "process": row.process,
                        "as_published": row.as_published(found),
                        "ours": row.ours(found),
                        "difference": row.difference(found),
                        "agrees": row.agrees(found),
                        "left": row.left(found),
                        "command": command(row.setting, row.methods),
                    }
                    for row in table.rows
                ],
            }
            for table in wanted
        ],
        "runs": [
            {"method": case.method, **asdict(case.setting), **asdict(one)}
            for case, one in found.items()
        ],
    }
