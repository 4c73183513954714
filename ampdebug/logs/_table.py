"""All formats by name. The parts of the table are ``_table_mindspore``, ``_table_others`` and
``_table_frameworks``."""

from __future__ import annotations

from ampdebug.logs._format import LogFormat
from ampdebug.logs._table_frameworks import FRAMEWORK_FORMATS
from ampdebug.logs._table_mindspore import MINDSPORE_FORMATS
from ampdebug.logs._table_others import GENERIC, OTHER_FORMATS

FORMATS: tuple[LogFormat, ...] = MINDSPORE_FORMATS + OTHER_FORMATS + FRAMEWORK_FORMATS
"""The specific formats. A line belongs to at most one of them (tested)."""

__all__ = ["BY_NAME", "FORMATS", "GENERIC"]

BY_NAME: dict[str, LogFormat] = {row.name: row for row in (*FORMATS, GENERIC)}
