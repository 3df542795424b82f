"""``python -m tidekv``, which is also how plans run a prefill."""

import atexit
import os
import sys

from tidekv.cli import main

status = main()
if "torch" in sys.modules:
    # To take torch and transformers apart takes a quarter of a second, and nobody needs it.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
sys.exit(status)
