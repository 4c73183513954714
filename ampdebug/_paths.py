"""Paths that users give."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ampdebug._errors import ArgumentError


def as_path(value: Any, name: str) -> Path:
    """The path that an argument is.

    Args:
        value: What was given; a str or an ``os.PathLike`` of one is right.
        name: The argument's name, for the error.

    Raises:
        ArgumentError: It is something else.
    """
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise ArgumentError(f"{name}={value!r}: must be a path, as text or as a pathlib.Path")
    return Path(value)
