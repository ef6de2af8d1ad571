"""Build steps as forks of one process that has imported Triton already.

Importing Triton and hashing its 400 MB library (for a cache that nothing here uses) takes a second,
and ninja starts sixty steps. setup.py starts one server; a step's command is this file as a script,
which imports none of it: it hands its arguments, stdout and stderr to the server, and exits with
what the fork that did the step returned.

    python -IS forks.py STEP ARGUMENT ...
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping

VARIABLE = "DFLASH_FORKS"  # number of the descriptor that requests are sent to
_LONGEST_REQUEST = 1 << 16

Steps = Mapping[str, Callable[[list[str]], None]]


@contextlib.contextmanager
def server(prepare: Callable[[], Steps]) -> Iterator[int]:
    """The descriptor that commands inherit. `prepare`, at the first request, does what all share.

    The server ends when nobody holds the descriptor any more, however the others ended.
    """
    requests, clients = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process == 0:
        try:
            clients.close()
            _serve(requests, prepare)
        finally:
            os._exit(1)
    requests.close()
    try:
        yield clients.fileno()
    finally:
        clients.close()
        os.waitpid(process, 0)


def _serve(requests: socket.socket, prepare: Callable[[], Steps]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end of the commands is the end
    steps: Steps | None = None
    while True:
        message, descriptors, _, _ = socket.recv_fds(
            requests, _LONGEST_REQUEST, 3, socket.MSG_CMSG_CLOEXEC
        )
        _reap(0 if not message else os.WNOHANG)
        if not message:
            os._exit(0)
        steps = steps or prepare()
        if os.fork() == 0:
            requests.close()
            _answer(message.decode().split("\0"), *descriptors, steps)
        for descriptor in descriptors:
            os.close(descriptor)


def _reap(options: int) -> None:
    """Collects ended forks, and with them the processor time that the build took."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, options)[0]:
            pass


def _answer(arguments: list[str], reply: int, out: int, err: int, steps: Steps) -> None:
    """Runs one step with its command's stdout and stderr. Never returns."""
    import traceback

    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.dup2(out, 1)
        os.dup2(err, 2)
        steps[arguments[0]](arguments[1:])
        code = 0
    except SystemExit as error:  # with a message, as the interpreter would print it
        print(error, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(OSError):  # the command may be gone
            os.write(reply, bytes([code]))
        os._exit(code)


def request(arguments: list[str]) -> int:
    """Has the server run a step; its exit status."""
    if VARIABLE not in os.environ:
        raise SystemExit("error: this is a step of setup.py's build, which starts its server")
    mine, theirs = socket.socketpair()
    with socket.socket(fileno=int(os.environ[VARIABLE])) as requests:
        message = "\0".join(arguments).encode()
        socket.send_fds(requests, [message], [theirs.fileno(), 1, 2])
    theirs.close()
    answer = mine.recv(1)
    if not answer:
        raise SystemExit(f"error: the process of {' '.join(arguments)} was killed")
    return answer[0]


if __name__ == "__main__":
    raise SystemExit(request(sys.argv[1:]))
