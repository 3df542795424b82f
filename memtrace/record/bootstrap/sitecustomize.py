"""Runs in every Python process that a recorded command starts, before the user's code.

``memtrace record`` puts this folder first on ``PYTHONPATH``, so the interpreter imports this module
in place of the user's ``sitecustomize``. It starts the recorder, steps aside and lets the import go
on to the one that would have run.
"""

import os
import sys

_here = os.path.dirname(__file__)
# Children still find it: they inherit PYTHONPATH, not sys.path.
sys.path[:] = [entry for entry in sys.path if entry != _here]

if "MEMTRACE_RUN" in os.environ:
    try:
        # This interpreter may be another one than memtrace is installed in, so the folder that
        # holds memtrace is on its path for this one import only, which itself imports nothing.
        sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(_here))))
        try:
            import memtrace  # noqa: F401
        finally:
            del sys.path[0]
        from memtrace.record.child import start

        start()
    except Exception as error:  # whatever it was, the user's program must run
        print(f"memtrace: process {os.getpid()} is not recorded: {error}", file=sys.stderr)

# If there is no other one, this raises what the interpreter expects when there is none.
del sys.modules["sitecustomize"]
import sitecustomize  # type: ignore[import-not-found]  # noqa: E402, F401
