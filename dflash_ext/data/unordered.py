"""Work that mostly waits, done by many threads at once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def unordered(
    items: Iterator[Item], work: Callable[[Item], Result], *, threads: int
) -> Iterator[Result]:
    """`work(item)` of every item, as they are finished; at most 2 * `threads` are taken ahead.

    The first exception of a worker is raised here. Threads are daemons: leaving early, by an
    exception or Ctrl-C, does not wait for what still runs.
    """
    tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
    results: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def serve() -> None:
        while (task := tasks.get()) is not None:
            try:
                results.put((True, work(task[0])))
            except BaseException as error:  # a thread has nobody else to tell
                results.put((False, error))

    def take() -> Any:
        good, value = results.get()
        if not good:
            raise value
        return value

    for _ in range(threads):
        threading.Thread(target=serve, daemon=True).start()
    outstanding = 0
    try:
        for item in items:
            if outstanding == 2 * threads:
                yield take()
                outstanding -= 1
            tasks.put((item,))
            outstanding += 1
        while outstanding:
            yield take()
            outstanding -= 1
    finally:
        for _ in range(threads):
            tasks.put(None)
