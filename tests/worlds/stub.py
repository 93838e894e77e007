"""Stands for a process that a prepared one forks: ``python -I -S stub.py SOCKET WORD...``.

It gives it its environment, working directory and output, forwards signals to it, and ends as it does. It imports
little, so that it starts in some hundredths of a second.
"""

import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> None:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(sys.argv[1])
    request = {"words": sys.argv[2:], "environment": dict(os.environ), "folder": os.getcwd()}  # noqa: PTH109 (few imports)
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    socket.send_fds(server, [json.dumps(request).encode()], [1, 2])
    pid = int(server.recv(100))
    for number in FORWARDED:
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    code = int(server.recv(100) or b"1")  # nothing: the prepared process has died, and the other with it
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
