"""Where a session sends its steps while training runs, beside the store."""

from __future__ import annotations

import os
from typing import Any


def live_sinks(tensorboard: str | os.PathLike[str] | None) -> tuple[Any, ...]:
    """The live sinks that were asked for; each is called with every step and the session."""
    if tensorboard is None:
        return ()
    from ampdebug.hooks._live_tensorboard import LiveTensorBoard

    return (LiveTensorBoard(tensorboard),)
