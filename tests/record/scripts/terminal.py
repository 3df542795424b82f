"""What a shell does for one job: it runs in the foreground of a terminal; SIGCONT means `fg`.

usage: terminal.py COMMAND... (as the leader of a session, with a terminal on standard input)
"""

import fcntl
import os
import signal
import subprocess
import sys
import termios

fcntl.ioctl(0, termios.TIOCSCTTY)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
job = subprocess.Popen(sys.argv[1:], process_group=0)
os.tcsetpgrp(0, job.pid)
signal.signal(signal.SIGCONT, lambda *_: os.killpg(job.pid, signal.SIGCONT))
sys.exit(job.wait())
