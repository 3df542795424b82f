"""Runs and curves that readers planned, by ``tidekv plan``: the viewer knows its command line."""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.figures.capacity import Curve
from app.making import Making, everything, place
from memtrace.trace import SUFFIX

#: What ``--compare`` knows, and what ``--model`` has configurations of.
METHODS = (
    *("snapkv", "mst", "tidekv", "published", "chunked", "full", "online", "keydiff"),
    *("kivi", "headinfer"),
)
MODELS = ("llama-3.1-8b", "mistral-7b-v0.2", "smollm2")
#: Asks ``tidekv`` to tell how far it is.
_TELLING = {"TIDEKV_PROGRESS": "1"}
#: Exit status of a plan that says that something doesn't fit.
_DOES_NOT_FIT = 3


@dataclass(frozen=True)
class Prefill:
    """What is planned, but for its method and its length."""

    model: str
    chunk: int
    budget: int
    allocator: str  # PYTORCH_CUDA_ALLOC_CONF

    def words(self) -> list[str]:
        """As the command line has it."""
        words = ["--model", self.model, "--chunk-size", str(self.chunk)]
        words += ["--budget", str(self.budget)]
        return [*words, "--allocator", self.allocator] if self.allocator else words


@dataclass
class _Asked(Making):
    """A question to ``tidekv plan``.

    Attributes:
        words: the question.
        bars: how many progress bars it shows one after another.
    """

    words: Sequence[str] = ()
    bars: int = 1
    _seen: int = 0
    _said: list[str] = field(default_factory=list)

    tells_on_stderr = True
    good = frozenset({0, _DOES_NOT_FIT})

    def heard(self, line: str) -> None:
        if not line.startswith("{"):
            self._said.append(line.strip())
            return
        step = json.loads(line)
        self._seen += step["done"] == 0
        now = self._seen - 1 + step["done"] / max(step["total"], 1)
        self.share = min(max(now, 0) / self.bars, 1.0)

    def complaint(self, rest: str) -> str:
        return self._said[-1].removeprefix("tidekv: ") if self._said else ""

    @property
    def command(self) -> str:
        """In a shell."""
        return shlex.join(["tidekv", "plan", *self.words])

    def ask(self, *output: str) -> None:
        """Start the process."""
        words = [sys.executable, "-P", "-m", "tidekv", "plan", *self.words, *output, "--json"]
        self.start(words, _TELLING)


@dataclass
class PlannedRun(_Asked):
    """A run of one method; ``document`` is what ``tidekv plan --json`` says of it."""

    method: str = ""
    document: Mapping[str, Any] = field(default_factory=dict)

    @property
    def output(self) -> Path:
        """Where ``--compare`` puts its runs."""
        return self.folder.with_name("runs")

    def finish(self, rest: str) -> None:
        (self.output / f"{self.method}{SUFFIX}").rename(self.folder)
        [self.document] = json.loads(rest)["plans"]

    @property
    def command(self) -> str:
        return f"{super().command} -o {shlex.quote(self.name.replace(' ', '-'))}"


@dataclass
class PlannedCurves(_Asked):
    """Peaks by prompt length, a curve a method."""

    curves: Sequence[Curve] = ()

    def finish(self, rest: str) -> None:
        document = json.loads(rest)
        self.curves = [
            Curve(one["method"], document["card"], one["probes"]) for one in document["methods"]
        ]


def plan(prefill: Prefill, method: str, prompt: int, card: str) -> PlannedRun:
    """Plan one prompt, unless that was done already or is under way."""
    words = [*prefill.words(), "--compare", method, "--prompt", str(prompt), "--device", card]
    for known in everything():
        if isinstance(known, PlannedRun) and known.words == words:
            return known
    name = f"{method} {prompt} {card}"
    alike = sum(one.name.startswith(name) for one in everything())
    name = f"{name} ({alike + 1})" if alike else name
    made = PlannedRun(name, place(name), words=words, method=method)
    made.ask("-o", str(made.output))
    return made


def plan_curves(prefill: Prefill, methods: Sequence[str], prompts: str) -> PlannedCurves:
    """Plan prompts of several lengths, unless that was done already or is under way."""
    words = [*prefill.words(), "--compare", ",".join(methods), "--prompts", prompts]
    for known in everything():
        if isinstance(known, PlannedCurves) and known.words == words:
            return known
    bars = len(methods) * (prompts.count(",") + 1)
    made = PlannedCurves("the curve", place("curve"), words=words, bars=bars)
    made.ask()
    return made


def planned_runs() -> list[PlannedRun]:
    """Those that were made."""
    return [one for one in everything() if isinstance(one, PlannedRun) and one.made]


def planned_curves() -> PlannedCurves | None:
    """The last ones that were made."""
    found = [one for one in everything() if isinstance(one, PlannedCurves) and one.made]
    return found[-1] if found else None


def planning() -> list[Making]:
    """What is under way."""
    return [one for one in everything() if isinstance(one, _Asked) and one.running]
