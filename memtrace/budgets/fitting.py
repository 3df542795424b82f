"""Whether a test fits the card that it is planned for: what an out-of-memory error met."""

from pathlib import Path

from memtrace.analysis.accounts import accounts
from memtrace.analysis.oom import Oom, ooms
from memtrace.budgets.recording import Recording
from memtrace.budgets.verdicts import Finding, allocations
from memtrace.devices import choose
from memtrace.sizes import format_size

#: Label of the finding.
FITS = "fits"
#: Allocations that are listed.
_TOP = 8


def ran_out(error: BaseException | None) -> bool:
    """Whether an exception is CUDA's lack of memory, or was raised because of it."""
    import torch

    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def does_not_fit(recording: Recording, card: str, root: Path) -> Finding | None:
    """The last out-of-memory error of this process; None: there was none.

    Args:
        recording: of the test.
        card: what it runs on, as ``memtrace devices`` has it.
        root: the folder whose frames are the user's.

    Raises:
        MemtraceError: the recording is incomplete.
    """
    recording.now()
    own, _ = recording.processes()
    cards = choose(card)
    found = [
        oom
        for account in accounts(own)
        if account.device.startswith("cuda:")
        for oom in ooms(account, cards[int(account.device.removeprefix("cuda:"))].total)
    ]
    if not found:
        return None
    oom = max(found, key=lambda one: one.time_us)
    asked = f"{format_size(oom.requested)} asked for {oom.place.within}"
    one = Finding(FITS, over=[f"doesn't fit {card}: {asked}"], text=_text(oom, card, root))
    recording.keep = True
    return one.kept(recording.path, recording.start)


def _text(oom: Oom, card: str, root: Path) -> str:
    total = "unknown" if oom.total is None else format_size(oom.total)
    rows = {
        "asked for": oom.requested,
        "free": oom.free,
        "reserved": oom.reserved,
        "allocated": oom.allocated,
        **{f"  {name}": size for name, size in oom.components.items() if size},
    }
    return "\n".join(
        [
            f"it doesn't fit {oom.device} ({card}, planned) of {total}: {oom.place.within}",
            oom.verdict,
            "",
            *(f"{name:<12}{format_size(size):>14}" for name, size in rows.items()),
            "",
            "largest allocations then:",
            *allocations(oom.top[:_TOP], root),
        ]
    )
