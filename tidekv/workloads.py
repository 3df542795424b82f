"""Workloads: lists of requests, as JSON Lines, and generators of mixes that stress an allocator.

A line is an object with ``id``, ``prompt_tokens`` or ``prompt`` (text), ``new_tokens`` and
``arrival`` (seconds after the first; 0 where it is missing). ``cycle`` numbers repetitions of the
same requests, where there are any.
"""

import json
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

from tidekv.errors import TidekvError

_MOST_TOKENS = 1 << 40
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Request:
    """One request of a workload.

    Attributes:
        id: its name; no two of a workload have the same.
        prompt_tokens: how long the prompt is; None: as long as ``prompt``.
        new_tokens: how many tokens are generated.
        arrival: seconds after the workload began.
        prompt: text, for a model with a tokenizer; None: any tokens will do.
        cycle: which repetition it belongs to; None: nothing repeats.
    """

    id: str
    prompt_tokens: int | None
    new_tokens: int
    arrival: float = 0.0
    prompt: str | None = None
    cycle: int | None = None

    def line(self) -> str:
        """As a line of a file, without what isn't said."""
        kept = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(kept, ensure_ascii=False)


# -- files ---------------------------------------------------------------------------------------


def load(path: Path) -> list[Request]:
    """The requests of a file, in its order.

    Raises:
        TidekvError: it can't be read, or a line is no request.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TidekvError(f"The workload {path} can't be read ({error}).") from error
    found: list[Request] = []
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = _parsed(line)
            if request.id in seen:
                raise TidekvError(f"the id {request.id!r} was there before")
        except TidekvError as error:
            raise TidekvError(f"{path}, line {number}: {error}") from None
        seen.add(request.id)
        found.append(request)
    if not found:
        raise TidekvError(f"The workload {path} has no requests.")
    return found


def check_requests(number: int | None) -> None:
    """
    Raises:
        TidekvError: so many requests can't be answered; None: all of them.
    """
    if number is not None and number < 1:
        raise TidekvError(f"--requests must be at least 1, not {number}.")


def save(requests: Iterable[Request], path: Path) -> None:
    """Write requests as JSON Lines.

    Raises:
        OSError: the disk is full, or the folder isn't there.
    """
    text = "".join(request.line() + "\n" for request in requests)
    path.write_text(text, encoding="utf-8")


def _parsed(line: str) -> Request:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise TidekvError("this is not JSON") from None
    if not isinstance(found, dict):
        raise TidekvError("a request is a JSON object")
    unknown = found.keys() - {"id", "prompt_tokens", "prompt", "new_tokens", "arrival", "cycle"}
    if unknown:
        raise TidekvError(f"a request has no {', '.join(sorted(unknown))}")
    name, prompt, arrival = found.get("id"), found.get("prompt"), found.get("arrival", 0.0)
    if not _is_text(name):
        raise TidekvError("a request has an id, a text")
    if prompt is not None and not _is_text(prompt):
        raise TidekvError("prompt is a text")
    if (prompt is None) == (found.get("prompt_tokens") is None):
        raise TidekvError("a request has either prompt_tokens or prompt")
    if isinstance(arrival, bool) or not isinstance(arrival, (int, float)):
        raise TidekvError("arrival is a number of seconds")
    if not 0 <= arrival < math.inf:
        raise TidekvError("arrival is a number of seconds from 0 on")
    return Request(
        id=name,
        prompt_tokens=_count(found, "prompt_tokens", 1),
        new_tokens=_count(found, "new_tokens", 0, 0) or 0,
        arrival=float(arrival),
        prompt=prompt,
        cycle=_count(found, "cycle", 0),
    )


def _is_text(value: Any) -> TypeGuard[str]:
    """Not empty, and no half of a surrogate pair, which JSON can spell and nothing can print."""
    return isinstance(value, str) and value != "" and not _SURROGATE.search(value)


def _count(found: dict[str, Any], name: str, least: int, default: int | None = None) -> int | None:
    value = found.get(name, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _MOST_TOKENS:
        raise TidekvError(f"{name} is a whole number, {least} or more")
    return value


# -- generators ----------------------------------------------------------------------------------


def mixed(
    lengths: Sequence[int], requests: int, new_tokens: int, seed: int = 0
) -> Iterator[Request]:
    """Cycles over ``lengths``, each in an order of its own: what a server of a fixed mix sees.

    Every cycle holds the same requests, so that one can be compared with another.
    """
    draw = random.Random(seed)
    order = list(lengths)
    for number in range(requests):
        cycle, place = divmod(number, len(order))
        if place == 0:
            draw.shuffle(order)
        yield Request(f"r{number:04d}", order[place], new_tokens, cycle=cycle)


def zipf(
    shortest: int, longest: int, requests: int, new_tokens: int, seed: int = 0, s: float = 1.1
) -> Iterator[Request]:
    """Lengths are powers of two, the k-th shortest with probability proportional to 1 / kˢ."""
    draw = random.Random(seed)
    steps = list(_powers(shortest, longest))
    weights = [(rank + 1) ** -s for rank in range(len(steps))]
    for number, length in enumerate(draw.choices(steps, weights, k=requests)):
        yield Request(f"r{number:04d}", length, new_tokens)


def long_tail(
    shortest: int, longest: int, requests: int, new_tokens: int, seed: int = 0, alpha: float = 1.0
) -> Iterator[Request]:
    """Lengths follow a Pareto distribution with exponent ``alpha``, cut off at ``longest``.

    Most are short, and a few very long: P(length > x) = (shortest / x)^alpha below the cut.
    """
    draw = random.Random(seed)
    for number in range(requests):
        length = min(int(shortest * draw.paretovariate(alpha)), longest)
        yield Request(f"r{number:04d}", length, new_tokens)


def bursty(
    shortest: int, longest: int, requests: int, new_tokens: int, seed: int = 0, burst: int = 8
) -> Iterator[Request]:
    """Bursts of ``burst`` requests on average, of one length each, half a minute apart."""
    draw = random.Random(seed)
    steps = list(_powers(shortest, longest))
    arrival, left, length = 0.0, 0, shortest
    for number in range(requests):
        if left == 0:
            arrival += draw.expovariate(1 / 30) if number else 0.0
            left = 1 + min(int(draw.expovariate(1 / max(burst - 1, 1e-9))), 4 * burst)
            length = draw.choice(steps)
        left -= 1
        arrival += draw.expovariate(10)
        yield Request(f"r{number:04d}", length, new_tokens, arrival=round(arrival, 3))


def _powers(shortest: int, longest: int) -> Iterator[int]:
    size = shortest
    while size <= longest:
        yield size
        size *= 2


#: What ``tidekv workload make`` makes from the shortest and the longest prompt.
GENERATORS: dict[str, Callable[..., Iterator[Request]]] = {
    "zipf": zipf,
    "long-tail": long_tail,
    "bursty": bursty,
}


def make(
    kind: str,
    *,
    shortest: int,
    longest: int,
    requests: int,
    new_tokens: int,
    seed: int = 0,
    lengths: Sequence[int] | None = None,
) -> list[Request]:
    """A workload of one kind; ``lengths``: of ``mixed``, by default the powers of two between.

    Raises:
        TidekvError: there is no such kind, or no such prompt.
    """
    if kind != "mixed" and kind not in GENERATORS:
        known = ", ".join(["mixed", *GENERATORS])
        raise TidekvError(f"There is no workload {kind!r}; there are {known}.")
    if requests < 1 or new_tokens < 0:
        raise TidekvError("A workload has one request or more, and no less than 0 new tokens.")
    if lengths is not None and (kind != "mixed" or not lengths or min(lengths) < 1):
        raise TidekvError("Lengths are of a mixed workload, each 1 token or more.")
    if not 1 <= shortest <= longest < _MOST_TOKENS:
        raise TidekvError(f"Prompts of {shortest} to {longest} tokens can't be made.")
    if kind == "mixed":
        chosen = list(lengths or _powers(shortest, longest))
        return list(mixed(chosen, requests, new_tokens, seed))
    return list(GENERATORS[kind](shortest, longest, requests, new_tokens, seed))
