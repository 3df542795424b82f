"""The rules of a user, read from a TOML file (``docs/rules.md``)."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from memtrace.components import base
from memtrace.errors import MemtraceError
from memtrace.sizes import format_size, parse_size

#: Conditions on the scopes around an event, by the kind of scope.
SCOPES = ("request", "phase", "layer", "chunk", "module", "class", "op")
#: Conditions on a text: any of the globs that are given must match.
GLOBS = (*SCOPES, "stack", "from")
#: Conditions on the size of an allocation, in bytes, both inclusive.
SIZES = ("min", "max")
_KEYS = ("component", "name", *GLOBS, *SIZES)


@dataclass(frozen=True)
class UserRule:
    """Bytes that meet every condition belong to ``component``."""

    number: int  # from 1, as they stand in the file
    name: str | None
    component: str
    globs: Mapping[str, tuple[str, ...]]
    min: int | None  # bytes
    max: int | None

    @property
    def title(self) -> str:
        return f"rule {self.number} ({self.name})" if self.name else f"rule {self.number}"

    def document(self) -> dict[str, Any]:
        """The rule as manifests keep it."""
        given = {"name": self.name, "min": self.min, "max": self.max}
        return {
            "component": self.component,
            **{key: list(globs) for key, globs in self.globs.items()},
            **{key: value for key, value in given.items() if value is not None},
        }


@dataclass(frozen=True)
class UserRules:
    """The rules of one file; the first that matches wins."""

    file: str
    rules: tuple[UserRule, ...]


def load_rules(path: Path) -> UserRules:
    """Read a rules file.

    Raises:
        MemtraceError: it can't be read or says something that no rule can say.
    """
    try:
        if path.exists() and not path.is_file():
            raise MemtraceError(f"{path} is not a file of rules")
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MemtraceError(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # TOML's error and Unicode's are ValueErrors
        raise MemtraceError(f"{path} is not TOML: {error}") from None
    unknown = [key for key in content if key != "rule"]
    if unknown:
        raise MemtraceError(f"{path} has the unknown key {unknown[0]!r}; write rules as [[rule]]")
    rules = content.get("rule")
    if not isinstance(rules, list) or not rules:
        raise MemtraceError(f"{path} has no rule; write each as [[rule]]")
    return UserRules(
        str(path), tuple(_rule(path, number, body) for number, body in enumerate(rules, 1))
    )


def _rule(path: Path, number: int, body: Any) -> UserRule:
    def refuse(problem: str) -> MemtraceError:
        name = body.get("name") if isinstance(body, dict) else None
        title = f"rule {number} ({name})" if isinstance(name, str) else f"rule {number}"
        return MemtraceError(f"{path}: {title} {problem}")

    if not isinstance(body, dict):
        raise refuse("is no table; write it as [[rule]]")
    for key in body:
        if key not in _KEYS:
            raise refuse(f"has the unknown key {key!r}; use {', '.join(_KEYS)}")
    if not isinstance(body.get("name", ""), str):
        raise refuse("has a name that is no text")
    component = body.get("component")
    if not isinstance(component, str):
        raise refuse('has no component; write component = "Act" or another one')
    try:
        base(component)
    except ValueError as error:
        raise refuse(f"has a wrong component: {error}") from None
    globs = {key: _globs(body[key]) for key in GLOBS if key in body}
    for key, found in globs.items():
        if not found:
            raise refuse(f"has a {key!r} that is neither a text nor a list of texts")
    sizes: dict[str, int] = {}
    for key in SIZES:
        try:
            if key in body:
                sizes[key] = parse_size(body[key])
        except MemtraceError as error:
            raise refuse(f"has a wrong {key!r}: {error}") from None
    if not globs and not sizes:
        raise refuse("has no condition, so it would match everything; give it at least one")
    low, high = sizes.get("min"), sizes.get("max")
    if low is not None and high is not None and low > high:
        raise refuse(f"can't match: {format_size(low)} at least and {format_size(high)} at most")
    return UserRule(
        number, body.get("name"), component, {k: v for k, v in globs.items() if v}, low, high
    )


def _globs(value: Any) -> tuple[str, ...] | None:
    """One or several globs; a layer may be a number. None: anything else."""
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(item, (str, int)) and not isinstance(item, bool) for item in values):
        return None
    return tuple(map(str, values))


def any_match(globs: tuple[str, ...], text: str) -> bool:
    """Whether one of the globs matches the whole text, case and all."""
    return any(fnmatchcase(text, glob) for glob in globs)
