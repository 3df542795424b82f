"""Errors whose message is one sentence: what was wrong and what to do."""

from collections.abc import Iterable

#: The exit status of a prompt that the device has no memory for.
DOES_NOT_FIT = 3


class TidekvError(ValueError):
    """What the caller can put right; the command line prints it and exits with this status."""

    exit_status = 2


class InfeasibleError(TidekvError):
    """A prefill that can't be done as asked; raised before any tensor is allocated."""


class LoadError(TidekvError):
    """A model that can't be loaded."""


class DeviceMemoryError(TidekvError):
    """The device has no memory left."""

    exit_status = DOES_NOT_FIT


def check_choice(what: str, name: str, choices: Iterable[str]) -> None:
    """
    Raises:
        InfeasibleError: ``name`` is not one of ``choices``.
    """
    known = list(choices)
    if name not in known:
        raise InfeasibleError(f"There is no {what} {name!r}; use one of {', '.join(known)}.")


def check_made(what: str, made: object, wanted: type) -> None:
    """
    Raises:
        InfeasibleError: ``made`` is no instance of ``wanted``, but perhaps its class.
    """
    if isinstance(made, type) and issubclass(made, wanted):
        raise InfeasibleError(f"A {what} must be made first: write {made.__name__}().")
    if not isinstance(made, wanted):
        raise InfeasibleError(f"A {what} is a name or a {wanted.__name__}, not {made!r}.")
