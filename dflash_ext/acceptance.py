"""What a set of generations says: accepted lengths, per slot too, and how well they were foretold.

Decoded, not teacher forced: every step counts where decoding really came by. Pure arithmetic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_ext.generate import Generation
from dflash_ext.metrics import RECALL_AT

RANKS = (1, *RECALL_AT)


@dataclass(frozen=True)
class MethodReport:
    """One way of decoding one prompt set; B is the block size."""

    prompts: int
    tokens: int
    """Generated in all."""
    seconds: float
    """Wall clock, reading the prompts included."""
    steps: int = 0
    """Forwards of the target after the one that read the prompt."""
    accept_len: float = 1.0
    """Mean tokens a step yields (1..B)."""
    full_block_rate: float = 0.0
    """Share of steps that yielded B tokens."""
    slot_acceptance: list[float | None] = field(default_factory=list)
    """For slots 1..B-1: share of steps whose text was guessed there, among those in which all slots
    before it were; None where no step came so far."""
    recall: dict[int, list[float | None]] = field(default_factory=dict)
    """k -> for slots 1..B-1: share of steps in which the text's token is among the drafter's k
    likeliest, whether or not the slots before were right; empty if not recorded."""
    expected: float | None = None
    """Accepted length that the drafter's own probabilities foretold, on average."""
    calibration: float | None = None
    """Realised over foretold mass: guesses accepted over those expected. Below 1: overconfident."""
    identical: int | None = None
    """Prompts whose tokens equal plain decoding's; None if not compared."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        recalled = {str(k): slots for k, slots in self.recall.items()}
        speed = {"tokens_per_second": self.tokens_per_second}
        return dataclasses.asdict(self) | {"recall": recalled} | speed


def summarise(
    generations: Sequence[Generation],
    block_size: int,
    reference: Sequence[Generation] | None = None,
) -> MethodReport:
    """Counts over generations; `reference` is plain decoding of the same prompts."""
    reached, passed = [0] * block_size, [0] * block_size  # entry k: slot k, entry 0 unused
    lengths: list[int] = []
    foretold: list[tuple[float, int]] = []
    for generation in generations:
        for i, length in enumerate(generation.accepted):
            lengths.append(length)
            for slot in range(1, length):
                reached[slot] += 1
                passed[slot] += 1
            # A step cut short by a stop token says nothing about the slots after it.
            cut = generation.stopped and i == len(generation.accepted) - 1
            if length < block_size and not cut:
                reached[length] += 1
            if generation.expected and not cut:
                foretold.append((generation.expected[i], length - 1))
    identical = None
    if reference is not None:
        identical = sum(a.tokens == b.tokens for a, b in zip(generations, reference, strict=True))
    steps, mass = len(lengths), sum(expected for expected, _ in foretold)
    return MethodReport(
        prompts=len(generations),
        tokens=sum(len(g.tokens) for g in generations),
        seconds=sum(g.seconds for g in generations),
        steps=steps,
        accept_len=sum(lengths) / steps if steps else 1.0,
        full_block_rate=lengths.count(block_size) / steps if steps else 0.0,
        slot_acceptance=[p / r if r else None for p, r in zip(passed[1:], reached[1:])],
        recall=recall(generations, block_size),
        expected=1 + mass / len(foretold) if foretold else None,
        calibration=sum(n for _, n in foretold) / mass if mass else None,
        identical=identical,
    )


def recall(generations: Sequence[Generation], block_size: int) -> dict[int, list[float | None]]:
    """k of RANKS -> share of recorded ranks below k, per slot 1..B-1; {} if none were recorded."""
    per_slot: list[list[int]] = [[] for _ in range(block_size - 1)]
    for generation in generations:
        for step in generation.ranks:
            for slot, rank in enumerate(step):
                per_slot[slot].append(rank)
    if not any(per_slot):
        return {}
    return {
        k: [sum(r < k for r in ranks) / len(ranks) if ranks else None for ranks in per_slot]
        for k in RANKS
    }
