"""``python -m ampdebug`` is the command ``ampdebug``."""

import sys

from ampdebug._cli import main

sys.exit(main())
