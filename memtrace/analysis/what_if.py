"""A recorded device under another allocator: what is changed, and what is taken for granted."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from memtrace.allocator.replay import write_replay
from memtrace.allocator.requests import Requests, requests_of, version_of
from memtrace.allocator.settings import NEWEST, Settings, parse_version
from memtrace.allocator.simulation import ENDLESS, Outcome, Progress, Setup
from memtrace.analysis.accounts import Account
from memtrace.analysis.recorded import setup_of
from memtrace.devices import Device, catalogue
from memtrace.errors import MemtraceError
from memtrace.sizes import format_size, parse_size
from memtrace.trace.reader import Trace


@dataclass(frozen=True)
class Change:
    """What is other than in the recording; None: nothing.

    Attributes:
        conf: ``PYTORCH_CUDA_ALLOC_CONF``.
        device: a card of the catalogue, or how much memory it has, such as ``24 GiB``.
        torch: the version whose rules hold.
    """

    conf: str | None = None
    device: str | None = None
    torch: str | None = None

    def __str__(self) -> str:
        return ", ".join(self._words()) or "as recorded"

    def _words(self) -> Iterator[str]:
        if self.conf is not None:
            yield self.conf or "no settings"
        if self.device is not None:
            yield self.device
        if self.torch is not None:
            yield f"torch {self.torch}"

    def of(self, setup: Setup) -> Setup:
        """The recorded allocator with this change.

        Raises:
            MemtraceError: a setting, a device or a version is none.
        """
        if self.torch is not None:
            setup = replace(setup, torch=parse_version(self.torch))
        if self.device is not None:
            setup = _on(self.device, setup)
        if self.conf is not None:
            setup = replace(setup, settings=Settings.parse(self.conf, setup.torch))
        if setup.settings.backend != "native":
            raise MemtraceError(
                "cudaMallocAsync can't be replayed; memtrace replay --allocator async gives bounds"
            )
        return setup


def _on(device: str, setup: Setup) -> Setup:
    card = catalogue().get(device)
    if card is not None:
        return on_card(setup, card)
    try:
        total = parse_size(device)
    except MemtraceError:
        total = 0
    if total == 0:
        raise MemtraceError(
            f"{device!r} is neither a card of memtrace devices nor a size such as 24 GiB"
        )
    return with_memory(setup, total)


def on_card(setup: Setup, card: Device) -> Setup:
    """The allocator on a card of the catalogue."""
    return replace(setup, total=card.total, outside=card.context or 0, pool=card.pool)


def with_memory(setup: Setup, total: int) -> Setup:
    """The allocator on a device of which nothing is known but its memory, in bytes."""
    return replace(setup, total=total, outside=0, pool=None)


def replayed(
    trace: Trace,
    account: Account,
    change: Change,
    out: Path,
    progress: Progress = lambda done: None,
) -> tuple[Outcome, list[str]]:
    """Write what the account's requests make of another allocator as the run ``out``.

    Args:
        progress: is called with how many events were done since the last time, about.

    Returns:
        What became of them, and what was taken for granted.

    Raises:
        MemtraceError: the change can't be made, or ``out`` not be written.
    """
    setup = change.of(setup_of(trace, account.process, account.device))
    requests = requests_of(account.process, account.device)
    conf = "as recorded" if change.conf is None else change.conf
    [outcome] = write_replay(trace, [requests], [setup], conf, out, progress)
    return outcome, conditions(requests, setup)


def conditions(requests: Requests, setup: Setup, option: str | None = None) -> list[str]:
    """What a replay takes for granted, in words; ``option``: how to give a size that it lacks."""
    known, asked = (".".join(map(str, one)) for one in (min(setup.torch, NEWEST), setup.torch))
    rules = f"By the rules of torch {known}"
    if known != asked:
        rules += f", the newest that was checked, and not of {asked}"
    if version_of(requests.process) is None:
        rules += ", since the run doesn't say which it had"
    if setup.total == ENDLESS:
        hint = f" ({option})" if option else ""
        notes = [f"{rules}; without a limit, since the size of the device isn't known{hint}."]
    else:
        outside = f", {format_size(setup.outside)} of it used by others" if setup.outside else ""
        notes = [f"{rules}, on a device of {format_size(setup.total)}{outside}."]
    if requests.warm:
        notes.append(
            f"{requests.warm} blocks were there before the recording; they are asked for first, by "
            "address: their real order isn't known."
        )
    if requests.strange:
        notes.append(f"{requests.strange} frees of unknown blocks were left out.")
    return notes
