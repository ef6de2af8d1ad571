"""A proposer that knows every text and is right exactly as deep as it is told to be."""

from __future__ import annotations

import itertools
import random
from contextlib import nullcontext

import torch
from tiny_targets import VOCAB

from dflash_ext.proposers import Proposal


class Oracle:
    """Chains, or trees of up to `tree` guesses in which the right path hides among wrong ones.

    truths: prompt -> what follows it. right: how deep each proposal is right, in turn. Wrong
    guesses of a tree hang anywhere, also under wrong ones where their token would be right; a
    token may stand twice under one parent. Features of kept tokens are collected per prompt.
    """

    def __init__(self, truths, right, *, block_size=8, tree=0, features=False):
        self.truths = {tuple(prompt): truth for prompt, truth in truths.items()}
        self.right, self.block_size = itertools.cycle(right), block_size
        self.width, self.needs_trees = tree or block_size - 1, bool(tree)
        self.uses_features, self.features = features, {}
        self.random = random.Random(0)

    def fixed(self):
        return nullcontext()

    def open(self, rows, capacity):
        self.rows = [None] * rows

    def start(self, row, tokens, features):
        prompt = tuple(tokens[:-1])
        self.rows[row] = [prompt, 1]
        self.features[prompt] = [] if features is None else [features]

    def observe(self, tokens, features, kept):
        begin = 0
        for row, (state, new, count) in enumerate(zip(self.rows, tokens, kept.counts)):
            state[1] += len(new)
            assert kept.rows[begin : begin + count].tolist() == [row] * count
            if features is not None:
                self.features[state[0]].append(features[begin : begin + count])
            begin += count

    def select(self, rows):
        self.rows = [self.rows[r] for r in rows]

    def propose(self, roots):
        found = [
            self._tree(*state) if self.needs_trees else self._chain(*state) for state in self.rows
        ]
        n = max(len(ids) for ids, _ in found)
        ids = [ids + [5] * (n - len(ids)) for ids, _ in found]
        parents = [list(parents) + [0] * (n - len(parents)) for _, parents in found]
        return Proposal(
            torch.tensor(ids, dtype=torch.int64).view(len(found), n),
            parents,
            [len(parents) for _, parents in found],
        )

    def _next(self, prompt, known):
        return (self.truths[prompt] + [3] * self.block_size)[known : known + self.block_size - 1]

    def _chain(self, prompt, known):
        right = next(self.right)
        ids = self._next(prompt, known)
        return [t if k < right else (t + 1) % VOCAB for k, t in enumerate(ids)], range(len(ids))

    def _tree(self, prompt, known):
        truth, right, draw = self._next(prompt, known), next(self.right), self.random
        ids, parents, depth, path = [], [], [0], [0]  # path: nodes that are right
        for left in range(draw.randrange(max(right, 1), self.width + 1), 0, -1):
            rest = right - (len(path) - 1)
            if rest and (left <= rest or draw.random() < 0.4):
                parent, token = path[-1], truth[len(path) - 1]
                path.append(len(ids) + 1)
            else:
                parent = draw.choice([i for i, d in enumerate(depth) if d < self.block_size - 1])
                expected = truth[depth[parent]]
                token = (
                    expected if parent not in path else (expected + draw.randrange(1, 4)) % VOCAB
                )
            ids.append(token)
            parents.append(parent)
            depth.append(depth[parent] + 1)
        return ids, parents
