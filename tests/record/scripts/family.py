"""Start one child in each way there is and print what each one is, as ``KIND PID`` lines."""

import multiprocessing
import os
import subprocess
import sys


def introduce(kind: str) -> None:
    os.write(1, f"{kind} {os.getpid()}\n".encode())


if __name__ == "__main__":
    introduce("parent")
    for method in ("fork", "spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=introduce, args=(method,))
        process.start()
        process.join()
    pid = os.fork()
    if pid == 0:
        introduce("os.fork")
        os._exit(0)
    os.waitpid(pid, 0)
    code = "import os, sys; os.write(1, f'{sys.argv[1]} {os.getpid()}\\n'.encode())"
    subprocess.run([sys.executable, "-c", code, "subprocess"], check=True)
    subprocess.run(f'"{sys.executable}" -c "{code}" shell', shell=True, check=True)
    os.execv(sys.executable, [sys.executable, "-c", code, "exec"])
