"""How a record becomes a row of a table and back; nothing that is read is trusted.

NULL means unknown. SQLite has no NaN (it turns it into NULL), so a number that is not finite is stored as the text
``nan``, ``inf`` or ``-inf`` in the same column. JSON is strict; inside it such a number is the same word as a string.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ampdebug._errors import ArgumentError, FormatError
from ampdebug._records import KINDS, Birth

JSON_MAX_DEPTH = 100


# --- values -----------------------------------------------------------------------------------------------------------


def real_to_sql(value: float) -> float | str:
    """A float as a column value: NaN and infinities as text."""
    value = float(value)
    return value if math.isfinite(value) else str(value)


def _integer(value: Any) -> int:
    number = operator.index(value)
    if not -(1 << 63) <= number < 1 << 63:
        raise OverflowError("does not fit 64 bits")
    return number


def _real_from_sql(value: Any) -> float | None:
    if value is None or isinstance(value, float):
        return value
    if isinstance(value, int):
        return float(value)
    if value in ("nan", "inf", "-inf"):
        return float(value)
    raise ValueError(f"{value!r} is not a number")


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """The value as strict JSON has it. numpy scalars become Python's, numbers that are not finite become words."""
    if depth > JSON_MAX_DEPTH:
        raise ArgumentError(f"{where} is nested deeper than {JSON_MAX_DEPTH} levels or contains itself; flatten it")
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, dict):
        return {str(key): _plain(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return _plain(value.item(), where, depth)
    raise ArgumentError(
        f"{where} is a {type(value).__name__}; a run holds plain JSON values only: convert it to a number, text, list "
        "or dict first (str(value) if nothing else fits)"
    )


def to_json(value: Any, where: str) -> str:
    """Strict JSON text; ``where`` names the value in the error.

    Raises:
        ArgumentError: it holds something that JSON has no form for.
    """
    try:
        return json.dumps(_plain(value, where), separators=(",", ":"), allow_nan=False)
    except ArgumentError:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise ArgumentError(f"{where} can't be written as JSON: {error}") from error


def from_json(text: Any) -> Any:
    """The value of JSON text; raises ValueError for anything else."""
    if not isinstance(text, str):
        raise ValueError(f"{type(text).__name__} where JSON text belongs")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("JSON nested too deeply") from error


def text_to_sql(text: str) -> str:
    """Text that UTF-8 can hold: lone surrogates (from odd file names) become backslash escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def read_shape(text: Any) -> tuple[int, ...] | None:
    """A shape as a file has it; ValueError for anything else."""
    if text is None:
        return None
    sides = from_json(text)
    if not isinstance(sides, list) or not all(type(side) is int for side in sides):
        raise ValueError(f"{text!r} is not a shape")
    return tuple(sides)


# --- records ----------------------------------------------------------------------------------------------------------

_JSON_CONTAINERS: dict[str, type] = {
    "tuple[str, ...]": tuple,
    "dict[str, str]": dict,
    "dict[str, Any]": dict,
}


def _check_type(value: Any, annotation: str) -> Any:
    """A value out of a file, as the record's annotation wants it; ValueError where it does not fit."""
    kinds = annotation.split(" | ")
    if value is None and "None" in kinds:
        return None
    kind = kinds[0]
    if kind == "bool" and type(value) in (bool, int) and value in (0, 1):
        return bool(value)
    if kind == "int" and type(value) is int:
        return value
    if kind == "float":
        number = _real_from_sql(value)
        if number is not None:
            return number
    if kind == "str" and isinstance(value, str):
        return value
    if kind == "Kind" and value in KINDS:
        return value
    if kind.startswith("Literal[") and value in ("forward", "backward"):
        return value
    if kind == "tuple[str, ...]" and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if kind == "dict[str, str]" and isinstance(value, dict) and all(isinstance(item, str) for item in value.values()):
        return value
    if kind == "dict[str, Any]" and isinstance(value, dict):
        return value
    if kind == "Birth" and isinstance(value, dict):
        return _birth(value)
    raise ValueError(f"{value!r} where {annotation} belongs")


def _birth(value: dict[str, Any]) -> Birth:
    fields = dataclasses.fields(Birth)
    return Birth(**{field.name: _check_type(value.get(field.name), str(field.type)) for field in fields})


class RecordTable:
    """How one record type lies in its table: one column a field, in the order of the fields.

    The columns follow from the dataclass, so a field that is added to a record can't be forgotten here; an annotation
    with no known column type raises at import.
    """

    def __init__(self, record: type[Any], table: str, *extra: tuple[str, str]) -> None:
        self.record = record
        self.table = table
        self.fields = [(field.name, str(field.type)) for field in dataclasses.fields(record)]
        columns = [(name, self._column_type(annotation)) for name, annotation in self.fields]
        self.columns = tuple(name for name, _ in (*columns, *extra))
        self.declaration = ", ".join(f'"{name}" {kind}' for name, kind in (*columns, *extra))
        marks = ", ".join("?" * len(self.columns))
        self.names = ", ".join(f'"{name}"' for name in self.columns)
        self.insert = f"INSERT INTO {table} ({self.names}) VALUES ({marks})"
        self._encode = [(name, annotation, self._encoder(annotation)) for name, annotation in self.fields]

    @staticmethod
    def _column_type(annotation: str) -> str:
        kinds = annotation.split(" | ")
        known = {"int": "INTEGER", "bool": "INTEGER", "float": "REAL", "str": "TEXT", "Kind": "TEXT", "Birth": "TEXT"}
        kind = "TEXT" if kinds[0] in _JSON_CONTAINERS else known[kinds[0]]
        return kind if "None" in kinds else f"{kind} NOT NULL"

    @staticmethod
    def _encoder(annotation: str) -> Callable[[Any, str], Any]:
        kind = annotation.split(" | ")[0]
        if kind == "float":
            return lambda value, where: real_to_sql(value)
        if kind in ("int", "bool"):
            return lambda value, where: _integer(value)
        if kind in ("str", "Kind"):
            return lambda value, where: text_to_sql(value)
        if kind == "Birth":
            return lambda value, where: to_json(dataclasses.asdict(value), where)
        return to_json

    def row(self, record: Any, *extra: Any) -> list[Any]:
        """The column values of a record.

        Raises:
            ArgumentError: a field holds a value of another type.
        """
        values: list[Any] = []
        for name, annotation, encode in self._encode:
            value = getattr(record, name)
            try:
                if value is None and not annotation.endswith("None"):
                    raise TypeError("None where a value belongs")
                values.append(None if value is None else encode(value, f"{self.record.__name__}.{name}"))
            except (TypeError, ValueError, OverflowError, AttributeError) as error:
                if isinstance(error, ArgumentError):
                    raise
                raise ArgumentError(
                    f"{self.record.__name__}.{name}={value!r} does not fit its type {annotation}; give a plain Python "
                    "value"
                ) from error
        return [*values, *extra]

    def parse(self, row: Sequence[Any]) -> Any:
        """The record of a row (without its extra columns).

        Raises:
            ValueError: a column holds what its field can't.
        """
        values = {}
        for (name, annotation), value in zip(self.fields, row, strict=False):
            try:
                if value is not None and annotation.split(" | ")[0] in (*_JSON_CONTAINERS, "Birth"):
                    value = from_json(value)
                values[name] = _check_type(value, annotation)
            except (ValueError, TypeError) as error:
                raise ValueError(f"column {name}: {error}") from error
        return self.record(**values)


def parse_rows(table: RecordTable, rows: Iterable[Sequence[Any]], path: Path) -> list[Any]:
    """Records of rows; a bad one raises `FormatError` naming file, table and row."""
    records = []
    for number, row in enumerate(rows):
        try:
            records.append(table.parse(row))
        except ValueError as error:
            raise FormatError(f"{path} is damaged: table {table.table!r}, row {number}: {error}") from error
    return records
