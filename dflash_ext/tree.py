"""Trees of guesses (DDTree): the heaviest prefixes of independent slots, and walks down a tree.

A tree is its parents: guess i (1..n) hangs under node parents[i - 1] < i; node 0 is the known
token. A chain is the tree 0, 1, .., n - 1.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np


class Node(NamedTuple):
    """One guess: the token of a rank at a slot, after the guesses above it."""

    parent: int
    """Node it hangs under: 0 for the known token, i for the i-th node of the tree."""
    depth: int
    """Slot, from 1."""
    rank: int
    """Of its token among the slot's likeliest."""
    score: float
    """Log-probability of its whole path."""


def heaviest_prefixes(log_probs: Sequence[Sequence[float]], budget: int) -> Iterator[Node]:
    """The `budget` likeliest paths, heaviest first (arXiv 2604.12989): parents precede children.

    log_probs: per slot 1.., the log-probabilities of its likeliest tokens, falling. The tree of a
    smaller budget is a prefix of that of a larger one. Fewer nodes if there are no more paths.
    """
    if not log_probs:
        return
    # (-score, depth, rank, parent's node, score of the parent); a level more than the nodes have.
    heap = [(-log_probs[0][0], 0, 0, 0, 0.0)]
    for number in range(1, budget + 1):
        if not heap:
            return
        negative, level, rank, parent, above = heapq.heappop(heap)
        yield Node(parent, level + 1, rank, -negative)
        if rank + 1 < len(log_probs[level]):
            sibling = above + log_probs[level][rank + 1]
            heapq.heappush(heap, (-sibling, level, rank + 1, parent, above))
        if level + 1 < len(log_probs):
            child = -negative + log_probs[level + 1][0]
            heapq.heappush(heap, (-child, level + 1, 0, number, -negative))


def is_chain(parents: Sequence[int]) -> bool:
    """Does every guess hang under the one before it?"""
    return all(parent == i for i, parent in enumerate(parents))


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of node 0 (which is 0) and of every guess."""
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return found


def ancestors(parents: Sequence[int]) -> np.ndarray:
    """bool [n + 1, n + 1]: row i marks node i itself and all nodes above it."""
    seen = np.eye(len(parents) + 1, dtype=bool)
    for i, parent in enumerate(parents, 1):
        seen[i] |= seen[parent]
    return seen


def walk(parents: Sequence[int], read: Sequence[int], said: Sequence[int]) -> list[int]:
    """Nodes from 0 down, as long as a child is what the target says after its parent.

    read: the token at every node; said: the target's own token after every node.
    """
    child: dict[tuple[int, int], int] = {}
    for i, parent in enumerate(parents, 1):
        child.setdefault((parent, read[i]), i)
    path = [0]
    while (node := child.get((path[-1], said[path[-1]]))) is not None:
        path.append(node)
    return path
