"""A line of a terminal that is written over."""

from __future__ import annotations

from typing import TextIO


class StatusLine:
    """One line that says how far something is.

    Args:
        stream: The terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def say(self, text: str) -> None:
        """Writes over the line."""
        print(f"\r\x1b[K{text}", end="", file=self._stream, flush=True)

    def clear(self) -> None:
        """Leaves no trace of the line."""
        self.say("")
