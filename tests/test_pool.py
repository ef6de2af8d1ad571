"""Blocks go out to whoever is idle and come back in order, whoever is slow."""

from __future__ import annotations

import threading
import time
from collections import deque
from multiprocessing import Pipe
from queue import SimpleQueue

import pytest
from busy_machine import PATIENCE_SECONDS

from dflash_ext.data.pool import _in_order
from dflash_ext.errors import UserError


class Answering:
    """In the place of a worker process: answers a block with itself, late if it is in `late`."""

    def __init__(self, late):
        self.late, self.received, self.most = late, 0, 0
        self.connection, self.theirs = Pipe()
        self.tasks, self.waiting = deque(), SimpleQueue()
        threading.Thread(target=self.work, daemon=True).start()

    def work(self):
        while True:
            rows = self.waiting.get()
            time.sleep(self.late.get(rows[0], 0.0))
            self.theirs.send(rows)

    def send(self, index, rows):
        self.received += 1
        self.tasks.append(index)
        self.most = max(self.most, len(self.tasks))
        self.waiting.put(rows)

    def receive(self):
        return self.tasks.popleft(), self.connection.recv()


@pytest.mark.parametrize("late", [{}, {0: 0.4}, {0: 0.2, 7: 0.3}, {8: 0.2, 9: 0.2}])
def test_a_slow_block_holds_up_nobody_for_ever(late):
    crew = [Answering(late) for _ in range(2)]
    found = []

    def run():
        blocks = ((f"block {i}", [i]) for i in range(20))
        found.extend(_in_order(blocks, crew))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert found == [(f"block {i}", [i]) for i in range(20)]
    assert all(worker.received > 1 for worker in crew)
    assert all(worker.most == 2 for worker in crew)  # the next block is there, and no more


def test_an_error_of_the_blocks_comes_behind_the_results_before_it():
    def blocks():
        yield from ((i, [i]) for i in range(5))
        raise UserError("cut short")

    found = []

    def collect():
        for tag, _ in _in_order(blocks(), [Answering({0: 0.1}) for _ in range(2)]):
            found.append(tag)

    with pytest.raises(UserError, match="cut short"):
        collect()
    assert found == [0, 1, 2, 3, 4]
