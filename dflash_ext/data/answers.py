"""Answers of a model in this process to given prompts: batches in lockstep, no padding.

Prompts of a batch differ in length. The part up to the shortest one's end is read in one forward;
from there each row takes its own prompt's tokens until they end, then the model's. So all rows
always have the same length, and no attention mask is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_ext.data.decoding import (
    CHECK_EVERY,
    DROP_SHARE,
    forward,
    sample_top_p,
    start_cache,
    up_to_stop,
)
from dflash_ext.transformers_api import can_drop_rows


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. temperature 0: the most probable one."""

    temperature: float
    top_p: float
    max_tokens: int
    """Of one answer."""


@torch.inference_mode()
def answer(
    model: Any,
    prompts: Sequence[list[int]],
    *,
    stops: list[int],
    sampling: Sampling,
    generator: torch.Generator,
) -> list[list[int]]:
    """The answer to each prompt, through its stop token, or `max_tokens` long without one.

    prompts: token ids, not empty. All together are one batch: bound its size. Deterministic for one
    device, batch and state of the generator.
    """
    device, rows = model.device, len(prompts)
    lengths = [len(prompt) for prompt in prompts]
    shortest, longest = min(lengths), max(lengths)
    total = longest + sampling.max_tokens
    # Beyond a prompt's end stands -1: there the model decides.
    given = torch.full((rows, total), -1, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        given[row, : len(prompt)] = torch.tensor(prompt)
    given = given.to(device)
    ends = torch.tensor(lengths, device=device) + sampling.max_tokens  # [rows]
    stop = torch.tensor(stops, device=device)
    written = given.clone()
    index = torch.arange(rows, device=device)
    done = torch.zeros(rows, dtype=torch.bool, device=device)
    answers: list[list[int]] = [[]] * rows
    logits, cache = start_cache(model, given[:, :shortest], rows, total)
    for step in range(shortest, total):
        own = given[:, step] < 0
        token = torch.where(own, _choose(logits, sampling, generator), given[:, step])
        written[:, step] = token
        done |= own & torch.isin(token, stop)
        done |= ends <= step + 1
        if (step + 1 - shortest) % CHECK_EVERY == 0 or step == total - 1:
            finished = done.nonzero().flatten()
            for row, tokens in zip(index[finished].tolist(), written[finished].tolist()):
                if not answers[row]:
                    last = min(step + 1, lengths[row] + sampling.max_tokens)
                    answers[row] = up_to_stop(tokens[lengths[row] : last], stops)
            left = (~done).nonzero().flatten()
            if left.numel() == 0:
                break
            if can_drop_rows(cache) and left.numel() <= (1 - DROP_SHARE) * done.numel():
                cache.batch_select_indices(left)
                given, written, index, token, ends, done = (
                    x[left] for x in (given, written, index, token, ends, done)
                )
        logits = forward(model, token[:, None], cache)
    return answers


def _choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    if sampling.temperature == 0:
        return logits.argmax(-1)
    return sample_top_p(logits / sampling.temperature, generator, sampling.top_p)
