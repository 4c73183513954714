"""The MindSpore side of ampdebug: attach to a training run and record it.

Everything that imports MindSpore is in this package; what it records is read by the rest of ampdebug without MindSpore.
"""

from __future__ import annotations

from ampdebug.hooks._monitor import AMPMonitor
from ampdebug.hooks._watch import Watch, watch

__all__ = ["AMPMonitor", "Watch", "watch"]
