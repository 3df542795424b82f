"""What an older PyTorch can't write into its allocator history: matched by time instead.

Memory metadata came with torch 2.10 and annotations with 2.14. Both clocks are the system's, and
agree to a few microseconds; the texts belong to the process, not to a thread.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

Entry = Mapping[str, Any]


class TimedTexts:
    """Texts with the time at which they were set, to be merged into the history's entries."""

    def __init__(self, text: str = "") -> None:
        self._text = text  # in force where the log begins
        self._log: list[tuple[int, int | None, str]] = []

    def announce(self, text: str) -> None:
        """What is allocated from now on is allocated under ``text``."""
        self._log.append((time.time_ns() // 1000, None, text))

    def annotate(self, address: int, text: str) -> None:
        """The block at ``address`` is annotated with ``text``."""
        self._log.append((time.time_ns() // 1000, address, text))

    def take(self) -> Self:
        """What was logged so far; the log goes on empty."""
        taken = type(self)(self._text)
        taken._log = self._log
        self._text = next((t for _, a, t in reversed(self._log) if a is None), self._text)
        self._log = []
        return taken

    def merged(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """The entries of one device with the texts, in order of time."""
        if not self._text and not self._log:
            return entries
        merged: list[Entry] = []
        text, position = self._text, 0
        for entry in entries:
            while position < len(self._log) and self._log[position][0] <= entry["time_us"]:
                text = self._merge(merged, position, text)
                position += 1
            merged.append(entry if entry.get("user_metadata") else {**entry, "user_metadata": text})
        for rest in range(position, len(self._log)):
            text = self._merge(merged, rest, text)
        return merged

    def _merge(self, merged: list[Entry], position: int, text: str) -> str:
        time_us, address, set_text = self._log[position]
        if address is None:
            return set_text
        merged.append(
            {
                "action": "annotate",
                "addr": address,
                "size": 0,
                "stream": 0,
                "time_us": time_us,
                "user_metadata": set_text,
            }
        )
        return text
