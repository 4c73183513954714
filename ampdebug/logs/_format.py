"""What a row of the table of log formats is, and how the text of a field becomes a number."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

NUMBER = (
    rb"[-+]?(?:\d{1,330}(?:\.\d*)?(?:[eE][-+]?\d{1,4})?|\.\d+(?:[eE][-+]?\d{1,4})?|[nN][aA][nN]|[iI][nN][fF](?:inity)?)"
)
"""A number as any of these tools prints it, NaN and infinities included."""

ScaleMeaning = Literal["used", "after", "unknown"]

Fields = dict[str, Any]
"""What one line says, by field name; a field that was not printed is absent. See ``FIELD_NAMES``."""

FIELD_NAMES = (
    "step",  # over the whole run, as printed
    "epoch",
    "epoch_step",  # within the epoch
    "epoch_steps",  # steps in an epoch
    "loss",
    "scale",
    "scale_before",  # an overflow line that names both
    "overflow",
    "grad_norm",
    "lr",
    "rank",
    "skipped",  # skipped since the last line
    "skipped_total",
    "nan_losses",  # since the last line
    "optimizer_step",  # the optimizer's own counter
    "applied",  # the overflowed update was applied nevertheless
    "dropped",
)


def number(text: bytes) -> float | None:
    """``float`` of a printed number, None for anything else (``False``, ``no loss for this stage``)."""
    try:
        return float(text)
    except ValueError:
        return None


@lru_cache(maxsize=1024)
def scale_number(text: bytes) -> float | None:
    """A printed loss scale; a power of two that was rounded to six digits (``1.04858e+06``) is made whole again.

    The same scale is often printed in full on one line and rounded on the next, which would look like a change.
    """
    value = number(text)
    if value is None or not 1.0 < value < math.inf:
        return value
    mantissa, exponent = math.frexp(value)
    if abs(mantissa - 0.5) < 3e-6:
        return math.ldexp(0.5, exponent)
    return math.ldexp(1.0, exponent) if 1.0 - mantissa < 6e-6 else value


def integer(text: bytes) -> int | None:
    """An integer of at most 15 digits; longer ones are damage, not step numbers."""
    text = text.strip()
    return int(text) if text.isdigit() and len(text) <= 15 else None


_TRUE = (b"true", b"1", b"yes")
_FALSE = (b"false", b"0", b"no")


def boolean(text: bytes) -> bool | None:
    """``True``/``[False]``/``1`` as a bool, None for anything else."""
    text = text.strip(b"[]() ").lower()
    return True if text in _TRUE else False if text in _FALSE else None


CONVERTERS: dict[str, Callable[[bytes], Any]] = {
    "step": integer,
    "epoch": integer,
    "epoch_step": integer,
    "epoch_steps": integer,
    "rank": integer,
    "skipped": integer,
    "skipped_total": integer,
    "nan_losses": integer,
    "optimizer_step": integer,
    "overflow": boolean,
    "loss": number,
    "scale": scale_number,
    "scale_before": scale_number,
    "grad_norm": number,
    "lr": number,
}


_KNOWN_BOOLEANS = {b"True": True, b"False": False}


def short_counter(text: bytes) -> int | None:
    """``integer`` of text that is known to be digits."""
    return int(text) if len(text) <= 15 else None


def _fast_boolean(text: bytes) -> bool | None:
    known = _KNOWN_BOOLEANS.get(text)
    return boolean(text) if known is None else known


_FAST: dict[str, Callable[[bytes], Any]] = {
    "step": short_counter,
    "epoch": short_counter,
    "epoch_step": short_counter,
    "epoch_steps": short_counter,
    "overflow": _fast_boolean,
    "loss": float,
    "scale": scale_number,
    "grad_norm": float,
    "lr": float,
}


Place = tuple[int, int, Callable[[bytes], Any]]
"""Begin and end of a field in its line, and what makes a value of the text there."""


@dataclass(frozen=True)
class LogFormat:
    """One row of the table: a line layout and what its parts mean.

    Attributes:
        name: What ``--format`` takes.
        tool: Who writes it.
        trigger: Bytes without which no line of this format exists; the cheap test before the pattern.
        pattern: Found anywhere in the line. Named groups are fields (``FIELD_NAMES``); other groups must not be named.
        pairs: Finds further ``(key, value)`` pairs in the line; None where ``pattern`` says all.
        keys: What the keys of ``pairs`` mean: ``{key: field}``.
        sample: Lines as the tool prints them; the tests read every one of them.
        scale: Whether the printed scale is the one used in the step or the one after the update.
        steps_from: Number of the first step (0 for tools that count from 0).
        epochs_from: Number of the first epoch; None where tools differ (0 if an epoch 0 is the first one seen, else 1).
        steps_restart: It is not known whether ``step`` starts anew in each epoch: a step that falls while the epoch
            rises says so.
        prints_overflow: The line says about every step it covers whether it overflowed.
        loss_is: ``"value"``, ``"mean"`` of the steps since the last line, or ``"rounded"``.
        loss_decimals: Decimals printed, None where the value is printed in full.
        drops_nan_loss: A NaN loss makes the field disappear.
        filters_nan_loss: A NaN loss is replaced by a number.
        repeats: The same step may be printed again (progress bars); the last print counts.
        finish: Last word on the fields of one line, for what a pattern can't say. What it does may depend on the words
            of the line and on the values of fields, never on certain digits in the text (see ``_shape``).
        locate: Fields that neither ``pattern`` nor ``pairs`` can tell: ``{field: (begin, end, converter)}``. They take
            the place of those of the same name. Like ``finish``, it may not look at certain digits.
        traps: For the manual; one sentence each.
        strict: The groups of ``pattern`` only match text of the field's kind, so that conversion can't fail.
    """

    name: str
    tool: str
    trigger: bytes
    pattern: re.Pattern[bytes]
    sample: tuple[str, ...]
    pairs: re.Pattern[bytes] | None = None
    keys: Mapping[bytes, str] = field(default_factory=dict)
    scale: ScaleMeaning = "unknown"
    steps_from: int = 1
    epochs_from: int | None = 1
    steps_restart: bool = False
    prints_overflow: bool = False
    loss_is: Literal["value", "mean"] = "value"
    loss_decimals: int | None = None
    drops_nan_loss: bool = False
    filters_nan_loss: bool = False
    repeats: bool = False
    finish: Callable[[Fields, bytes], None] | None = None
    locate: Callable[[bytes], Mapping[str, Place]] | None = None
    traps: tuple[str, ...] = ()
    strict: bool = True

    def __post_init__(self) -> None:
        fast = _FAST if self.strict else CONVERTERS
        plan = tuple(
            (index - 1, name, fast.get(name, CONVERTERS[name])) for name, index in self.pattern.groupindex.items()
        )
        object.__setattr__(self, "_plan", plan)

    def read(self, line: bytes) -> Fields | None:
        """The fields of ``line``, or None where it is not of this format."""
        match = self.pattern.search(line)
        if match is None:
            return None
        groups = match.groups()
        fields: Fields = {}
        plan: tuple[tuple[int, str, Callable[[bytes], Any]], ...] = self._plan  # type: ignore[attr-defined]
        for index, name, convert in plan:
            text = groups[index]
            if text is not None:
                value = convert(text)
                if value is not None:
                    fields[name] = value
        if self.pairs is not None:
            keys = self.keys
            for key, text in self.pairs.findall(line):
                known = keys.get(key.strip())
                if known is not None and known not in fields:
                    value = CONVERTERS[known](text)
                    if value is not None:
                        fields[known] = value
        if self.locate is not None:
            for name, (begin, end, convert) in self.locate(line).items():
                value = convert(line[begin:end])
                if value is not None:
                    fields[name] = value
        if self.finish is not None:
            self.finish(fields, line)
        return fields


_RANK = re.compile(rb"^\s{0,4}(?:\[(?:rank|default|Rank )(\d{1,5})\]:?|(\d{1,4}): )")


def rank_place(line: bytes) -> tuple[int, int] | None:
    """Where the rank stands in the prefix that launchers put before a line (``[rank1]:``), None where there is none."""
    if line[:1] not in b" [0123456789":
        return None
    match = _RANK.match(line)
    return None if match is None else match.span(match.lastindex or 0)


def rx(pattern: bytes) -> re.Pattern[bytes]:
    """Compile a table pattern; ``<N>`` stands for a number."""
    return re.compile(pattern.replace(b"<N>", NUMBER))
