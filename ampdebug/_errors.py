"""The exceptions ampdebug raises, and the one warning category it uses.

::

    AmpdebugError (Exception)
    ├── ArgumentError (also ValueError)     an argument is wrong; the message names it, its value, the rule, the way out
    ├── NoObservationsError                 a watched step yielded nothing; names the mode and the way out
    ├── ProbeError                          a worker process of a search died or took too long
    └── StoreError                          a run on disk cannot be written or read
        ├── RunExistsError                  two runs into one directory
        └── FormatError                     a truncated or foreign file

    AmpdebugWarning (UserWarning)           the monitor had to say something; training went on
"""

from __future__ import annotations


class AmpdebugError(Exception):
    """Root of everything ampdebug raises on purpose."""


class ArgumentError(AmpdebugError, ValueError):
    """An argument breaks a rule. The message names the argument, the value, the rule and the way out."""


class NoObservationsError(AmpdebugError):
    """A watched step yielded no observation. The message names the execution mode and the way out."""


class ProbeError(AmpdebugError):
    """A worker process died or took too long; the message says which, with the exit code or the limit."""


class StoreError(AmpdebugError):
    """A run on disk could not be written or read. The message names the file."""


class RunExistsError(StoreError):
    """The directory already holds a run of this rank and appending was not asked for."""


class FormatError(StoreError):
    """A file is truncated or is not a run of ampdebug. The message says what is wrong with it."""


class AmpdebugWarning(UserWarning):
    """The monitor had to say something; the training itself went on."""
