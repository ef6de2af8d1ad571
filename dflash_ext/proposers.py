"""Who guesses how a text goes on: the drafter (a chain or a tree), a copy of the text, nobody.

Guesses never affect what is generated, only how fast. Shapes: R sequences, n guesses, B slots, V
vocabulary, K*Ht features, P kept tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_ext.drafter import Drafter
from dflash_ext.drafting import Drafting
from dflash_ext.errors import UserError
from dflash_ext.export import check_pairing
from dflash_ext.layers import fixed_weights
from dflash_ext.loss import vocabulary_topk
from dflash_ext.reader import Kept, upload
from dflash_ext.sampling import GREEDY, Sampling, draw
from dflash_ext.target import Target
from dflash_ext.tree import heaviest_prefixes

RECORDED = 16
"""Likeliest tokens per slot that a recording proposer keeps (the largest recall@k)."""


@dataclass(frozen=True)
class Proposal:
    """Guesses after the known token of each of R sequences."""

    ids: Tensor
    """int64 [R, n] on the target's device; a row's last ones may be padding."""
    parents: Sequence[Sequence[int]]
    """Of each row's n guesses (tree.py); padding hangs anywhere."""
    counts: list[int]
    """Guesses of each row that are not padding."""
    expected: list[float] | None = None
    """Guesses that will be accepted, by the drafter's own probabilities."""
    likeliest: Tensor | None = None
    """int64 [R, B-1, RECORDED]: the drafter's tokens for each slot, likeliest first."""


class Proposer(Protocol):
    """Guesses for the sequences in R rows."""

    block_size: int
    """Guesses go at most block_size - 1 tokens deep."""
    width: int
    """Guesses of a sequence in one step, at most."""
    needs_trees: bool
    uses_features: bool

    def fixed(self) -> AbstractContextManager[None]:
        """Inside, the proposer's weights do not change."""

    def open(self, rows: int, capacity: int) -> None:
        """Begin with `rows` empty rows of at most `capacity` tokens."""

    def start(self, row: int, tokens: Sequence[int], features: Tensor | None) -> None:
        """A new sequence: its prompt and first token, features [t, K*Ht] of the prompt."""

    def observe(self, tokens: Sequence[Sequence[int]], features: Tensor | None, kept: Kept) -> None:
        """New tokens of every row; features [P, K*Ht] of the tokens in `kept`.

        The newest token is known one step before its features: the target has not read it yet.
        """

    def propose(self, roots: Tensor) -> Proposal:
        """Guesses after the newest tokens, int64 [R]."""

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""


class Nobody:
    """No guesses: the target alone."""

    block_size, width, needs_trees, uses_features = 1, 0, False, False

    def fixed(self) -> AbstractContextManager[None]:
        return nullcontext()

    def open(self, rows: int, capacity: int) -> None:
        pass

    def start(self, row: int, tokens: Sequence[int], features: Tensor | None) -> None:
        pass

    def observe(self, tokens: Sequence[Sequence[int]], features: Tensor | None, kept: Kept) -> None:
        pass

    def propose(self, roots: Tensor) -> Proposal:
        rows = len(roots)
        return Proposal(roots.new_empty(rows, 0), [()] * rows, [0] * rows)

    def select(self, rows: Sequence[int]) -> None:
        pass


class DrafterProposer:
    """One forward of the drafter fills a block of mask tokens for every sequence."""

    uses_features = True

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        tree: int | None = None,
        sampling: Sampling = GREEDY,
        record: bool = False,
    ) -> None:
        """tree: guesses of a tree (DDTree); None: a chain. UserError if the two do not pair.

        sampling: the target's own; a chain's guesses are drawn with the same random numbers, so
        that equal distributions give equal tokens. record: tell `likeliest` and `expected`.
        """
        check_pairing(drafter.config, target)
        if tree is not None and tree < 1:
            raise UserError(f"tree of {tree} guesses: expected at least 1")
        self.block_size = drafter.config.block_size
        self.width = self.block_size - 1 if tree is None else tree
        self.needs_trees = tree is not None
        self._target, self._drafter, self._tree = target, drafter, tree
        self._sampling, self._record = sampling, record
        # The attention operator is bf16 on CUDA; guesses may be rounded, what is kept is not.
        self._dtype = torch.bfloat16 if target.device.type == "cuda" else target.dtype
        self._embedding, self._head = target.vocabulary()
        self._mask = self._embedding[drafter.config.mask_token_id][None]

    def fixed(self) -> AbstractContextManager[None]:
        return fixed_weights(self._drafter)

    def open(self, rows: int, capacity: int) -> None:
        device = self._target.device
        self._drafting = Drafting(self._drafter, rows, capacity, device=device, dtype=self._dtype)

    def start(self, row: int, tokens: Sequence[int], features: Tensor | None) -> None:
        assert features is not None
        count, device = len(features), features.device
        counts = [0] * len(self._drafting.lengths)
        counts[row] = count
        self._drafting.reset(row)
        rows = torch.full((count,), row, device=device)
        places = torch.arange(count, device=device)
        self._drafting.extend(features.to(self._dtype), rows, places, counts)

    def observe(self, tokens: Sequence[Sequence[int]], features: Tensor | None, kept: Kept) -> None:
        assert features is not None
        self._drafting.extend(features.to(self._dtype), kept.rows, kept.places, kept.counts)

    def select(self, rows: Sequence[int]) -> None:
        self._drafting.select(rows)

    def propose(self, roots: Tensor) -> Proposal:
        R, slots = len(roots), self.block_size - 1
        embeds = torch.cat([self._embedding[roots], self._mask]).to(self._dtype)
        hidden = self._drafting.draft(embeds).view(R, slots + 1, -1)
        guesses = hidden[:, 1:].flatten(0, 1).to(self._head.dtype)  # [R * (B-1), H]
        likeliest, log_probs = None, None
        if self._tree is not None or self._record:
            k = min(max(self._tree or 0, RECORDED if self._record else 0), len(self._head))
            log_probs, ids = vocabulary_topk(guesses, self._head, k)
            log_probs, ids = log_probs.view(R, slots, k), ids.view(R, slots, k)
            likeliest = ids[..., :RECORDED] if self._record else None
        if self._tree is not None:
            assert log_probs is not None
            return self._trees(log_probs, ids, likeliest)
        if log_probs is not None and self._sampling.greedy:
            chosen = ids[..., 0]
        else:
            places = [length + k for length in self._drafting.lengths for k in range(1, slots + 1)]
            chosen = draw(F.linear(guesses, self._head), places, self._sampling).view(R, slots)
        expected = None
        if log_probs is not None and self._sampling.greedy:
            expected = log_probs[..., 0].cumsum(-1).exp().sum(-1).tolist()
        return Proposal(chosen, [range(slots)] * R, [slots] * R, expected, likeliest)

    def _trees(self, log_probs: Tensor, ids: Tensor, likeliest: Tensor | None) -> Proposal:
        """log_probs, ids [R, B-1, k]: the likeliest tokens of every slot."""
        assert self._tree is not None
        R, n, k = len(ids), self._tree, ids.shape[-1]
        places = np.zeros((R, n), dtype=np.int64)  # in a row's [(B-1) * k]
        parents, counts, expected = [], [], []
        for row, slots in enumerate(log_probs.tolist()):
            nodes = list(heaviest_prefixes(slots, n))
            places[row, : len(nodes)] = [(v.depth - 1) * k + v.rank for v in nodes]
            parents.append([v.parent for v in nodes] + [0] * (n - len(nodes)))
            counts.append(len(nodes))
            expected.append(float(np.exp([v.score for v in nodes]).sum()))
        chosen = ids.flatten(1).gather(1, upload(places, ids.device))
        return Proposal(chosen, parents, counts, expected, likeliest)


class PromptLookup:
    """The baseline without a model: copy what followed the last occurrence of the newest n-gram."""

    max_ngram = 3
    needs_trees = uses_features = False

    def __init__(self, block_size: int, device: torch.device) -> None:
        self.block_size, self.width = block_size, block_size - 1
        self._device = device
        self._texts: list[_Text] = []

    def fixed(self) -> AbstractContextManager[None]:
        return nullcontext()

    def open(self, rows: int, capacity: int) -> None:
        self._texts = [_Text(self.max_ngram) for _ in range(rows)]

    def start(self, row: int, tokens: Sequence[int], features: Tensor | None = None) -> None:
        self._texts[row] = _Text(self.max_ngram)
        self._texts[row].extend(tokens)

    def observe(self, tokens: Sequence[Sequence[int]], features: Tensor | None, kept: Kept) -> None:
        for text, new in zip(self._texts, tokens):
            text.extend(new)

    def propose(self, roots: Tensor) -> Proposal:
        found = [text.lookup(self.width) for text in self._texts]
        n = max(map(len, found))
        padded = [guesses + [0] * (n - len(guesses)) for guesses in found]
        ids = upload(np.array(padded, dtype=np.int64).reshape(len(found), n), self._device)
        return Proposal(ids, [range(n)] * len(found), [len(guesses) for guesses in found])

    def select(self, rows: Sequence[int]) -> None:
        self._texts = [self._texts[r] for r in rows]


class _Text:
    """A text and where its n-grams occurred last."""

    def __init__(self, max_ngram: int) -> None:
        self._max = max_ngram
        self._tokens: list[int] = []
        self._follower: dict[tuple[int, ...], int] = {}
        """n-gram -> position after its last occurrence, of those that something follows."""

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            end = len(self._tokens)
            for n in range(1, min(self._max, end) + 1):
                self._follower[tuple(self._tokens[end - n :])] = end
            self._tokens.append(token)

    def lookup(self, count: int) -> list[int]:
        """`count` guesses, from the longest n-gram that occurred before; empty if none did."""
        for n in range(min(self._max, len(self._tokens)), 0, -1):
            start = self._follower.get(tuple(self._tokens[-n:]))
            if start is not None:
                # A copy may run into itself: a period shorter than the block is repeated.
                period = self._tokens[start:]
                return [period[i % len(period)] for i in range(count)]
        return []
