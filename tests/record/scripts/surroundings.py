"""Print, as JSON, everything a program can easily tell of how it was started."""

import json
import os
import signal
import sys

print(
    json.dumps(
        {
            "argv": sys.argv,
            "orig_argv": sys.orig_argv,
            "name": __name__,
            "file": globals().get("__file__"),
            "main": sys.modules["__main__"].__dict__.keys() == globals().keys(),
            "path": sys.path,
            "flags": list(sys.flags),
            "executable": sys.executable,
            "cwd": os.getcwd(),
            "stdin": sys.stdin.read(),
            "terminals": [os.isatty(number) for number in range(3)],
            "descriptors": sorted(map(int, os.listdir("/proc/self/fd"))),
            "group": os.getpgrp(),
            "session": os.getsid(0),
            "umask": os.umask(0),
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "handlers": {
                number: str(signal.getsignal(number)).partition(" at ")[0]
                for number in signal.valid_signals()
            },
            "environment": {
                name: value
                for name, value in os.environ.items()
                if not name.startswith("MEMTRACE_") and name not in ("PYTHONPATH", "_")
            },
            "sitecustomize": getattr(sys.modules.get("sitecustomize"), "__file__", None),
        },
        sort_keys=True,
    )
)
