"""``python -m memtrace``."""

import sys

from memtrace.cli import main

sys.exit(main())
