"""Allocate one tensor a step and note each step in a file, until somebody ends this process.

usage: steps.py LOG [SECONDS exit|segfault]
"""

import ctypes
import os
import sys
import time

import torch

log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 60.0  # if nobody ends it
end = time.monotonic() + seconds
kept = []
while time.monotonic() < end:
    kept.append(torch.empty(1000))
    os.write(log, f"{time.monotonic()}\n".encode())
    time.sleep(0.002)
if sys.argv[3:] == ["exit"]:
    os._exit(4)
ctypes.string_at(0)
