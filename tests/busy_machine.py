"""Tests on a machine as busy as it likes: how long they wait, and which ports stay free."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_SECONDS = 300.0
"""The most that a test waits for what must happen soon. It only bounds a hang."""
_FIRST_PORT = 1024


def wait_until(happened: Callable[[], object]) -> None:
    """Return once it has; a test that waits longer than PATIENCE_SECONDS has failed."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not happened():
        assert time.monotonic() < end, "what must happen soon has not"
        time.sleep(0.005)


def free_port() -> int:
    """A port of the loopback device for a server that is still to start.

    Below those that the kernel gives to connections and to servers that ask for any, so that
    nobody gets it meanwhile.
    """
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for step in itertools.count(os.getpid()):  # two runs of the tests begin at different ports
        port = _FIRST_PORT + step % (given - _FIRST_PORT)
        with socket.socket() as server:
            try:
                server.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("unreachable")
