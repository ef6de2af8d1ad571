"""Greedy decoding, plain and speculative, one sequence at a time with key-value caches.

A speculative step proposes up to B-1 tokens, lets the target read the known token ("root") and
the proposals in one forward, keeps the longest prefix the target agrees with plus one token of the
target's own, and takes the rest back out of the cache. Whatever is proposed, the output is the
target's greedy output (up to the rounding of differently shaped matrix products: exact in fp32).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_ext.drafter import Drafter
from dflash_ext.errors import UserError
from dflash_ext.export import check_pairing
from dflash_ext.target import Target


@dataclass(frozen=True)
class Generation:
    tokens: list[int]
    """Generated ids, at most `max_new_tokens`; a stop token that ended them is the last one."""
    accepted: list[int]
    """Tokens each verification step yielded (1..B), cut after a stop token but not by
    `max_new_tokens`; the first token comes from reading the prompt and belongs to no step."""
    seconds: float
    """Wall clock, reading the prompt included."""
    stopped: bool
    """Whether a stop token ended the generation."""


class Proposer(Protocol):
    """Guesses the continuation; never affects what is generated, only how fast."""

    block_size: int
    """At most block_size - 1 tokens are proposed at a time."""
    uses_features: bool

    def observe(self, tokens: Sequence[int], features: Tensor | None) -> None:
        """Tokens that are now certain; features [t, K*Ht] of the rows the target has now kept.

        The newest token is known one step before its features: the target has not read it yet.
        """

    def propose(self, root: Tensor) -> Tensor:
        """int64 [<= B-1] on the target's device: guesses after `root` (int64 [1])."""


class DrafterProposer:
    """One forward of the drafter fills a block of mask tokens."""

    uses_features = True

    def __init__(self, target: Target, drafter: Drafter, capacity: int) -> None:
        """`capacity`: most context rows there will be. UserError if the two do not pair."""
        check_pairing(drafter.config, target)
        self.block_size = drafter.config.block_size
        self._drafter = drafter
        # The attention operator is bf16 on CUDA; guesses may be rounded, what is kept is not.
        self._dtype = torch.bfloat16 if target.device.type == "cuda" else target.dtype
        self._cache = drafter.new_cache(capacity, device=target.device, dtype=self._dtype)
        self._embedding, self._head = target.vocabulary()
        mask = self._embedding[drafter.config.mask_token_id]
        self._masks = mask.expand(self.block_size - 1, -1)

    def observe(self, tokens: Sequence[int], features: Tensor | None) -> None:
        assert features is not None
        self._drafter.extend_cache(self._cache, features.to(self._dtype))

    def propose(self, root: Tensor) -> Tensor:
        block = torch.cat([self._embedding[root], self._masks]).to(self._dtype)
        hidden = self._drafter.draft(self._cache, block)
        return F.linear(hidden[1:].to(self._head.dtype), self._head).argmax(-1)


class PromptLookup:
    """The baseline without a model: copy what followed the last occurrence of the newest n-gram."""

    max_ngram = 3
    uses_features = False

    def __init__(self, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self._device = device
        self._text: list[int] = []
        self._follower: dict[tuple[int, ...], int] = {}
        """n-gram -> position after its last occurrence, of those that something follows."""

    def observe(self, tokens: Sequence[int], features: Tensor | None = None) -> None:
        for token in tokens:
            end = len(self._text)
            for n in range(1, min(self.max_ngram, end) + 1):
                self._follower[tuple(self._text[end - n :])] = end
            self._text.append(token)

    def lookup(self) -> list[int]:
        """The proposal, from the longest n-gram that occurred before; empty if none did."""
        for n in range(min(self.max_ngram, len(self._text)), 0, -1):
            start = self._follower.get(tuple(self._text[-n:]))
            if start is not None:
                # A copy may run into itself: a period shorter than the block is repeated.
                period = self._text[start:]
                return [period[i % len(period)] for i in range(self.block_size - 1)]
        return []

    def propose(self, root: Tensor) -> Tensor:
        return torch.tensor(self.lookup(), dtype=torch.int64, device=self._device)


def _prompt(target: Target, prompt_ids: Sequence[int] | Tensor, new_tokens: int) -> list[int]:
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


@torch.no_grad()
def greedy_decode(
    target: Target,
    prompt_ids: Sequence[int] | Tensor,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
) -> Generation:
    """The target alone, one token a forward. `accepted` is empty."""
    prompt = _prompt(target, prompt_ids, max_new_tokens)
    begin = time.perf_counter()
    cache = target.new_cache()
    tokens: list[int] = []
    ids = torch.tensor(prompt, device=target.device)
    while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in stop_ids):
        logits, _ = target.forward_with_taps(ids, cache, last_only=True, taps=False)
        ids = logits.argmax(-1)
        tokens.append(int(ids))
    stopped = bool(tokens) and tokens[-1] in stop_ids
    return Generation(tokens, [], time.perf_counter() - begin, stopped)


def speculative_decode(
    target: Target,
    drafter: Drafter,
    prompt_ids: Sequence[int] | Tensor,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
) -> Generation:
    """Drafter and target together. UserError if they do not pair (`export.check_pairing`)."""
    capacity = len(prompt_ids) + max_new_tokens + drafter.config.block_size
    proposer = DrafterProposer(target, drafter, capacity)
    return decode(target, proposer, prompt_ids, max_new_tokens, stop_ids)


def prompt_lookup_decode(
    target: Target,
    prompt_ids: Sequence[int] | Tensor,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    *,
    block_size: int,
) -> Generation:
    """Prompt lookup as the proposer: block_size - 1 proposals a step."""
    proposer = PromptLookup(block_size, target.device)
    return decode(target, proposer, prompt_ids, max_new_tokens, stop_ids)


@torch.no_grad()
def decode(
    target: Target,
    proposer: Proposer,
    prompt_ids: Sequence[int] | Tensor,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
) -> Generation:
    """Generate with any proposer; equal to `greedy_decode` by construction."""
    prompt = _prompt(target, prompt_ids, max_new_tokens + proposer.block_size - 1)
    begin = time.perf_counter()
    taps, cache = proposer.uses_features, target.new_cache()
    tokens: list[int] = []
    accepted: list[int] = []
    if max_new_tokens > 0:
        ids = torch.tensor(prompt, device=target.device)
        logits, features = target.forward_with_taps(ids, cache, last_only=True, taps=taps)
        root = logits.argmax(-1)
        tokens = root.tolist()
        proposer.observe([*prompt, *tokens], features)
    while len(tokens) < max_new_tokens and tokens[-1] not in stop_ids:
        block = torch.cat([root, proposer.propose(root)])
        logits, features = target.forward_with_taps(block, cache, taps=taps)
        own = logits.argmax(-1)
        read, said = torch.stack([block, own]).tolist()  # the step's only wait for the device
        matched = matching_prefix(read[1:], said)
        new = until_stop(said[: matched + 1], stop_ids)
        accepted.append(len(new))
        tokens += new
        target.rollback(cache, len(read) - 1 - matched)
        root = own[matched : matched + 1]
        proposer.observe(new, features if features is None else features[: matched + 1])
    tokens = tokens[:max_new_tokens]
    stopped = bool(tokens) and tokens[-1] in stop_ids
    return Generation(tokens, accepted, time.perf_counter() - begin, stopped)


def matching_prefix(drafts: Sequence[int], said: Sequence[int]) -> int:
    """How many leading drafts are what the target says in their place."""
    matched = 0
    while matched < len(drafts) and drafts[matched] == said[matched]:
        matched += 1
    return matched


def until_stop(tokens: Sequence[int], stop_ids: Collection[int]) -> list[int]:
    """`tokens` up to and including the first stop token."""
    for i, token in enumerate(tokens):
        if token in stop_ids:
            return list(tokens[: i + 1])
    return list(tokens)
