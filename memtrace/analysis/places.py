"""Where in the program an event happened: request, phase, layer, chunk, module and operator."""

import re
from dataclasses import dataclass

import numpy as np

from memtrace.trace.reader import ProcessTrace

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")
SEPARATOR = " > "
OUTSIDE = "outside every scope"


@dataclass(frozen=True)
class Place:
    """The innermost scope of each kind around an event; None where there is none."""

    request: str | None = None
    phase: str | None = None
    layer: int | None = None
    chunk: int | None = None
    module: str | None = None
    op: str | None = None
    tag: str | None = None  # what another tool called it, in a snapshot that was imported

    def __str__(self) -> str:
        parts = [
            self.request and f"request {self.request}",
            self.phase,
            None if self.layer is None else f"layer {self.layer}",
            None if self.chunk is None else f"chunk {self.chunk}",
            self.module,
            self.op,
            self.tag and f"tag {self.tag}",
        ]
        return SEPARATOR.join(part for part in parts if part) or OUTSIDE

    @property
    def within(self) -> str:
        """The same as an adverbial: ``in …`` or ``outside …``."""
        return OUTSIDE if str(self) == OUTSIDE else f"in {self}"

    def folded(self) -> "Place":
        """The same without request, layer and chunk, and with ``*`` for indices in the module."""
        module = self.module and _INDEX.sub("*", self.module)
        return Place(phase=self.phase, module=module, op=self.op, tag=self.tag)


def place(process: ProcessTrace, scope: int) -> Place:
    """The place that row ``scope`` of the scopes stands for."""
    scopes = process.scopes
    found: dict[str, str] = {}
    while scope > 0:
        found.setdefault(scopes["kind"][scope], scopes["name"][scope])
        scope = int(scopes["parent"][scope])
    numbers = {kind: int(found[kind]) for kind in ("layer", "chunk") if kind in found}
    kinds = ("request", "phase", "module", "op", "tag")
    names = {kind: found[kind] for kind in kinds if kind in found}
    return Place(**names, **numbers)  # type: ignore[arg-type]


def inside(process: ProcessTrace, kind: str, name: str) -> np.ndarray:
    """Which scopes are the scope (kind, name) or lie in one: bool, one a row of the scopes."""
    scopes = process.scopes
    found = np.zeros(len(scopes["parent"]), dtype=bool)
    for row, parent in enumerate(scopes["parent"]):
        itself = scopes["kind"][row] == kind and scopes["name"][row] == name
        found[row] = itself or (parent >= 0 and found[parent])
    return found
