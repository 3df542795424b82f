"""Children end while another thread can take the signal, too: its reader must not wait for it."""

import os
import threading
import time

from memtrace.record.signals import _pending, blocked

threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
with blocked():
    for _ in range(300):
        if (child := os.fork()) == 0:
            os._exit(0)
        while not os.waitpid(child, os.WNOHANG)[0]:
            list(_pending())
        list(_pending())
