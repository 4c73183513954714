"""MindSpore where it is not installed: what to say in place of an import error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ampdebug._errors import AmpdebugError


def is_mindspore(error: ModuleNotFoundError) -> bool:
    """Whether the module that is missing is MindSpore, or a part of it."""
    return (error.name or "").split(".")[0] == "mindspore"


@contextmanager
def needs_mindspore(what: str, instead: str) -> Iterator[None]:
    """Around an import of ``ampdebug.hooks``.

    Args:
        what: What needs it: "`ampdebug run` trains".
        instead: What works without it.

    Raises:
        AmpdebugError: MindSpore is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if not is_mindspore(error):
            raise
        raise AmpdebugError(
            f"{what} with MindSpore, which is not installed here: pip install 'mindspore>=2.10'. {instead}"
        ) from error
