"""Decoding, plain and speculative, greedy and sampled, one sequence or many, with caches.

A step proposes a chain or a tree of guesses after the known token ("root"), lets the target read
them in one forward, walks down as long as a guess is what the target itself says there (its
likeliest token, or the draw that belongs to the position: sampling.py), and takes everything else
back out of the caches. So the text is the target's own whatever is proposed, up to the rounding of
differently shaped matrix products: exact in fp32.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dflash_ext.drafter import Drafter
from dflash_ext.errors import UserError
from dflash_ext.proposers import DrafterProposer, Nobody, PromptLookup, Proposal, Proposer
from dflash_ext.reader import Reader, open_reader, require_trees, upload
from dflash_ext.sampling import GREEDY, Sampling, draw
from dflash_ext.target import Target
from dflash_ext.tree import depths, walk

Finished = Callable[[], None]
"""Called whenever a sequence is finished."""


@dataclass(frozen=True)
class Generation:
    tokens: list[int]
    """Generated ids, at most `max_new_tokens`; a stop token that ended them is the last one."""
    accepted: list[int]
    """Tokens each verification step yielded (1..B), cut after a stop token but not by
    `max_new_tokens`; the first token comes from reading the prompt and belongs to no step."""
    seconds: float
    """Wall clock, reading the prompt included; of sequences decoded together an equal share."""
    stopped: bool
    """Whether a stop token ended the generation."""
    expected: list[float] = field(default_factory=list)
    """Per step, the accepted guesses that the drafter's probabilities predicted, where recorded."""
    ranks: list[list[int]] = field(default_factory=list)
    """Per step and slot, the rank of the text's token among the drafter's RECORDED likeliest
    (RECORDED: not among them), as far as the text goes; where recorded."""


@dataclass
class _Sequence:
    """One text in progress."""

    index: int
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)
    likeliest: list[tuple[int, list[list[int]]]] = field(default_factory=list)
    """Per step: tokens there were, and the drafter's likeliest for each slot after them."""

    def ranks(self) -> list[list[int]]:
        found = []
        for begin, slots in self.likeliest:
            pairs = zip(slots, self.tokens[begin:])
            found.append([s.index(t) if t in s else len(s) for s, t in pairs])
        return found


def _checked(target: Target, prompt_ids: Sequence[int] | Tensor, new_tokens: int) -> list[int]:
    """The prompt as a list; UserError if it is empty or the sequence outgrows the target."""
    prompt = prompt_ids.tolist() if isinstance(prompt_ids, Tensor) else list(prompt_ids)
    limit = getattr(target.model.config.get_text_config(), "max_position_embeddings", None)
    if not prompt:
        raise UserError("empty prompt: expected at least one token to continue")
    if limit is not None and len(prompt) + new_tokens > limit:
        raise UserError(
            f"prompt of {len(prompt)} tokens + {new_tokens} new ones exceed the target's "
            f"{limit} positions: shorten the prompt or lower max_new_tokens"
        )
    return prompt


class _Decoding:
    """The state of one `decode`: sequences in rows, those that wait, those that are done."""

    def __init__(
        self,
        target: Target,
        proposer: Proposer,
        prompts: list[list[int]],
        max_new_tokens: int,
        stop_ids: Collection[int],
        sampling: Sampling,
        batch: int,
        finished: Finished,
    ) -> None:
        self.target, self.proposer, self.sampling = target, proposer, sampling
        self.limit, self.stop_ids, self.finished = max_new_tokens, stop_ids, finished
        self.waiting = deque(_Sequence(i, prompt) for i, prompt in enumerate(prompts))
        self.done: list[_Sequence] = []
        rows = min(batch, len(prompts))
        longest = max(map(len, prompts)) + max_new_tokens + proposer.block_size
        self.reader: Reader = open_reader(target, rows, longest + proposer.width + 1)
        if proposer.needs_trees:
            require_trees(target)
        proposer.open(rows, longest)
        found = [self.admit(row) for row in range(rows)]
        self.active = [sequence for sequence in found if sequence is not None]
        if 0 < len(self.active) < rows:
            self.select([row for row, sequence in enumerate(found) if sequence is not None])

    def ended(self, sequence: _Sequence) -> bool:
        tokens = sequence.tokens
        return len(tokens) >= self.limit or (bool(tokens) and tokens[-1] in self.stop_ids)

    def finish(self, sequence: _Sequence) -> None:
        self.done.append(sequence)
        self.finished()

    def admit(self, row: int) -> _Sequence | None:
        """The next sequence that needs steps, now in `row`; None if none waits."""
        taps = self.proposer.uses_features
        while self.waiting:
            sequence = self.waiting.popleft()
            if self.limit > 0:
                logits, features = self.reader.start(row, sequence.prompt, taps=taps)
                sequence.tokens += draw(logits, [len(sequence.prompt)], self.sampling).tolist()
                if not self.ended(sequence):
                    self.proposer.start(row, [*sequence.prompt, *sequence.tokens], features)
                    return sequence
            self.finish(sequence)
        return None

    def select(self, rows: list[int]) -> None:
        self.reader.select(rows)
        self.proposer.select(rows)

    def step(self) -> None:
        """One forward of the target for all active sequences."""
        taps, device = self.proposer.uses_features, self.target.device
        roots = upload(np.array([s.tokens[-1] for s in self.active], dtype=np.int64), device)
        proposal = self.proposer.propose(roots)
        ids = torch.cat([roots[:, None], proposal.ids], 1)
        logits, features = self.reader.read(ids, proposal.parents, taps=taps)
        places = [
            length + depth + 1
            for length, parents in zip(self.reader.lengths, proposal.parents)
            for depth in depths(parents)
        ]
        own = draw(logits.flatten(0, 1), places, self.sampling).view_as(ids)
        read, said = self._to_host(ids, own, proposal)
        paths = [
            walk(parents[:count], r, s)
            for parents, count, r, s in zip(proposal.parents, proposal.counts, read, said)
        ]
        kept = self.reader.keep(paths)
        new = [until_stop([s[v] for v in path], self.stop_ids) for s, path in zip(said, paths)]
        for row, (sequence, tokens) in enumerate(zip(self.active, new)):
            sequence.accepted.append(len(tokens))
            sequence.tokens += tokens
            if proposal.expected is not None:
                sequence.expected.append(proposal.expected[row])
        if features is not None:
            features = features[kept.rows * ids.shape[1] + kept.nodes]
        self.proposer.observe(new, features, kept)
        self._replace()

    def _to_host(
        self, ids: Tensor, own: Tensor, proposal: Proposal
    ) -> tuple[list[list[int]], list[list[int]]]:
        """(tokens at the nodes, the target's after them): the step's only wait for the device."""
        parts = [ids, own]
        if proposal.likeliest is not None:
            parts.append(proposal.likeliest.flatten(1))
        read, n = torch.cat(parts, 1).tolist(), ids.shape[1]
        if proposal.likeliest is not None:
            k = proposal.likeliest.shape[2]
            for sequence, row in zip(self.active, read):
                slots = [row[i : i + k] for i in range(2 * n, len(row), k)]
                sequence.likeliest.append((len(sequence.tokens), slots))
        return [row[:n] for row in read], [row[n : 2 * n] for row in read]

    def _replace(self) -> None:
        """Finished sequences leave their rows to waiting ones; rows without one are dropped."""
        rows: list[int] = []
        active = []
        for row, sequence in enumerate(self.active):
            current: _Sequence | None = sequence
            if self.ended(sequence):
                self.finish(sequence)
                current = self.admit(row)
            if current is not None:
                rows.append(row)
                active.append(current)
        if active and len(active) < len(self.active):
            self.select(rows)
        self.active = active


@torch.no_grad()
def decode(
    target: Target,
    proposer: Proposer,
    prompts: Sequence[Sequence[int] | Tensor],
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    *,
    sampling: Sampling = GREEDY,
    batch: int = 1,
    finished: Finished = lambda: None,
) -> list[Generation]:
    """A continuation of every prompt, `batch` of them side by side; none depends on the others.

    The tokens depend on target, prompt and sampling only, not on proposer or batch. UserError for
    an empty prompt, one that outgrows the target, or a target that cannot do what is asked.
    """
    if batch < 1:
        raise UserError(f"batch {batch}: expected at least 1")
    checked = [_checked(target, p, max_new_tokens + proposer.block_size - 1) for p in prompts]
    if not checked:
        return []
    begin = time.perf_counter()
    with proposer.fixed():
        state = _Decoding(
            target, proposer, checked, max_new_tokens, stop_ids, sampling, batch, finished
        )
        while state.active:
            state.step()
    seconds = (time.perf_counter() - begin) / len(checked)
    generations = []
    for sequence in sorted(state.done, key=lambda s: s.index):
        tokens = sequence.tokens[:max_new_tokens]
        stopped = bool(tokens) and tokens[-1] in stop_ids
        ranks = sequence.ranks()
        generations.append(
            Generation(tokens, sequence.accepted, seconds, stopped, sequence.expected, ranks)
        )
    return generations


def plain_decode(
    target: Target,
    prompt_ids: Sequence[int] | Tensor,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    *,
    sampling: Sampling = GREEDY,
) -> Generation:
    """The target alone, one token a forward. Every step of `accepted` is 1."""
    return decode(target, Nobody(), [prompt_ids], max_new_tokens, stop_ids, sampling=sampling)[0]


def speculative_decode(
    target: Target,
    drafter: Drafter,
    prompt_ids: Sequence[int] | Tensor,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    *,
    tree: int | None = None,
    sampling: Sampling = GREEDY,
) -> Generation:
    """Drafter and target together, by chains or trees of `tree` guesses.

    UserError if they do not pair (`export.check_pairing`).
    """
    proposer = DrafterProposer(target, drafter, tree=tree, sampling=sampling)
    return decode(target, proposer, [prompt_ids], max_new_tokens, stop_ids, sampling=sampling)[0]


def prompt_lookup_decode(
    target: Target,
    prompt_ids: Sequence[int] | Tensor,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    *,
    block_size: int,
    sampling: Sampling = GREEDY,
) -> Generation:
    """Prompt lookup as the proposer: block_size - 1 proposals a step."""
    proposer = PromptLookup(block_size, target.device)
    return decode(target, proposer, [prompt_ids], max_new_tokens, stop_ids, sampling=sampling)[0]


def until_stop(tokens: Sequence[int], stop_ids: Collection[int]) -> list[int]:
    """`tokens` up to and including the first stop token."""
    for i, token in enumerate(tokens):
        if token in stop_ids:
            return list(tokens[: i + 1])
    return list(tokens)
