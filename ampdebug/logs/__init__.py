"""Reading training logs: a table of line formats, and a reader that streams."""

from __future__ import annotations

from ampdebug.logs._format import LogFormat
from ampdebug.logs._read import Coverage, read_log
from ampdebug.logs._table import BY_NAME, FORMATS, GENERIC

__all__ = ["BY_NAME", "FORMATS", "GENERIC", "Coverage", "LogFormat", "read_log"]
