"""The journal of a search: what each probe said, one JSON line at a time, so that a killed search can go on.

The first line names the search: a version, the *identity* (whatever must be equal for old answers to hold: net, data,
level, versions) and the keys of all items. Every other line is one probe; its set is written as indices into the keys.
Lines are flushed to disk one by one. A line that a kill cut short is dropped on reading; anything else that does not
fit is an error, since a wrong answer reused is worse than a lost one.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampdebug._errors import FormatError, StoreError

_KIND = "ampdebug-search-journal"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one probe said.

    Attributes:
        passed: The set was enough.
        margin: How far the measured value lies on the passing side of the threshold (negative: on the failing side), in
            the unit of the measurement; None where nothing was measured.
        reason: Why it failed where that is not the measurement: a crash, a timeout, a missing kernel. Else "".
    """

    passed: bool
    margin: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the journal: the keys of the set, what the probe said, and how long it took in seconds."""

    keys: frozenset[str]
    outcome: Outcome
    seconds: float


class Journal:
    """An append-only file of probes that belongs to one search.

    Args:
        path: The file; created where it does not exist, its folder too.
        identity: Plain JSON values that must be the same for the answers to hold.
        keys: The names of all items, in any order.

    Raises:
        FormatError: The file is no journal, is damaged, or belongs to another search; the message says which part of
            the identity differs.
        StoreError: The file cannot be read or written.
    """

    def __init__(self, path: str | os.PathLike[str], *, identity: Mapping[str, Any], keys: Collection[str]) -> None:
        self.path = Path(path)
        self._keys = sorted(keys)
        self._index = {key: index for index, key in enumerate(self._keys)}
        header = {"kind": _KIND, "version": _VERSION, "identity": dict(identity), "keys": self._keys}
        self._header: dict[str, Any] = json.loads(json.dumps(header))  # as it will read back: tuples become lists
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            whole = self.path.read_bytes() if self.path.exists() else b""
            *lines, cut_short = whole.split(b"\n")
            if not lines and not self._header_line().startswith(cut_short):
                raise FormatError(f"{self.path} is not a journal of a search; give another path or move it away")
            self.entries = self._read(lines) if lines else []
            if cut_short:
                # A kill left half a line; writing behind it would damage the next one.
                os.truncate(self.path, len(whole) - len(cut_short))
            self._file = open(self.path, "ab")  # noqa: SIM115 - open for as long as the search runs; closed by close()
            if not lines:
                self._write(self._header_line())
        except OSError as error:
            raise StoreError(f"the journal {self.path} cannot be opened: {error}") from error

    def append(self, keys: Collection[str], outcome: Outcome, seconds: float) -> None:
        """Write one probe; when this returns it is on disk.

        Raises:
            StoreError: It could not be written.
        """
        margin = outcome.margin
        line = {
            "set": sorted(self._index[key] for key in keys),
            "passed": outcome.passed,
            # JSON has no infinity and no NaN; as text they come back through float().
            "margin": margin if margin is None or math.isfinite(margin) else str(margin),
            "reason": outcome.reason,
            "seconds": round(seconds, 6),
        }
        try:
            self._write(json.dumps(line, allow_nan=False).encode() + b"\n")
        except OSError as error:
            raise StoreError(f"the journal {self.path} cannot be written: {error}") from error

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _header_line(self) -> bytes:
        return json.dumps(self._header).encode() + b"\n"

    def _write(self, line: bytes) -> None:
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self, lines: list[bytes]) -> list[Entry]:
        header = self._parse(lines[0], 1)
        if header.get("kind") != _KIND:
            raise FormatError(f"{self.path} is not a journal of a search; give another path or move it away")
        if header != self._header:
            raise FormatError(
                f"{self.path} belongs to another search: {self._difference(header)}. Its answers do not hold here; "
                f"give another path, or delete it to start anew"
            )
        return [self._entry(line, number) for number, line in enumerate(lines[1:], start=2)]

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            value = json.loads(line)
        except ValueError as error:
            raise FormatError(f"{self.path}, line {number}, is damaged: {error}") from error
        if not isinstance(value, dict):
            raise FormatError(f"{self.path}, line {number}, is damaged: not an object")
        return value

    def _entry(self, line: bytes, number: int) -> Entry:
        value = self._parse(line, number)
        try:
            if any(index < 0 for index in value["set"]):
                raise IndexError("negative index")
            keys = frozenset(self._keys[index] for index in value["set"])
            margin = None if value["margin"] is None else float(value["margin"])
            outcome = Outcome(bool(value["passed"]), margin, str(value["reason"]))
            return Entry(keys, outcome, float(value["seconds"]))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise FormatError(f"{self.path}, line {number}, is damaged: {error!r}") from error

    def _difference(self, header: Mapping[str, Any]) -> str:
        theirs, ours = header.get("identity", {}), self._header["identity"]
        if header.get("version") != _VERSION:
            return f"its format is version {header.get('version')!r}, this one writes {_VERSION}"
        if theirs != ours and isinstance(theirs, dict):
            name = next(name for name in sorted({*theirs, *ours}) if theirs.get(name) != ours.get(name))
            return f"{name} was {theirs.get(name)!r} and is {ours.get(name)!r}"
        return f"it searched {len(header.get('keys', []))} items and this search has {len(self._keys)}, or other ones"
