"""Cards of the catalogue: one by name, and which of them suffice for a plan."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memtrace.devices import Device, catalogue
from tidekv.errors import check_choice

if TYPE_CHECKING:
    from memtrace.analysis.summary import AccountSummary
    from memtrace.trace.reader import Trace


def card_of(name: str) -> Device:
    """One card of the catalogue.

    Raises:
        InfeasibleError: there is none of this name.
        MemtraceError: the user's catalogue is wrong.
    """
    known = catalogue()
    check_choice("card", name, known)
    return known[name]


def largest_card() -> Device:
    """The one with the most memory."""
    return max(catalogue().values(), key=lambda card: card.total)


@dataclass(frozen=True)
class Candidate:
    """Whether a card suffices for a plan.

    Attributes:
        lacks: bytes by which what is allocated at the peak is more than the card has; 0: it isn't,
            but where ``left`` is None what is free comes in pieces.
        left: bytes left at the peak of reserved, less a context that is known; None: no room.
        retries: how often its allocator gives back what it caches to make room.
    """

    card: Device
    lacks: int
    left: int | None
    retries: int

    @property
    def fits(self) -> bool:
        return self.left is not None

    def as_json(self) -> dict[str, Any]:
        return {
            "card": self.card.key,
            "total": self.card.total,
            "context": self.card.context,
            "fits": self.fits,
            "lacks": self.lacks,
            "left": self.left,
            "retries": self.retries,
        }


def candidates(trace: "Trace", account: "AccountSummary") -> list[Candidate]:
    """Every card of the catalogue, the smallest first, with a run's requests replayed on it.

    What a card makes PyTorch choose otherwise (the workspace of cuBLAS) is as it was in the run.

    Args:
        account: of the run's card, on which everything fitted.
    """
    from memtrace.allocator.requests import requests_of
    from memtrace.allocator.simulation import simulate
    from memtrace.analysis.recorded import setup_of
    from memtrace.analysis.what_if import Change

    process, device = account.account.process, account.device
    setup, requests = setup_of(trace, process, device), requests_of(process, device)
    judged = []
    for card in sorted(catalogue().values(), key=lambda card: card.total):
        room = card.total - (card.context or 0)
        lacks = max(account.peak.allocated - room, 0)
        if lacks:
            judged.append(Candidate(card, lacks, None, 0))
        elif account.reserved_peak is not None and account.reserved_peak <= room:
            judged.append(Candidate(card, 0, room - account.reserved_peak, 0))
        else:
            on_card = Change(device=card.key).of(setup)
            outcome = simulate(requests, on_card, stop_at_failure=True)
            left = room - outcome.reserved_peak if outcome.fits else None
            judged.append(Candidate(card, 0, left, outcome.retries))
    return judged
