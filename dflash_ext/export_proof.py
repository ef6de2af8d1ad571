"""The proof that an export is the drafter: read back, its logits equal an independent forward's.

Shapes: T context rows, N blocks, B slots, H hidden, V rows of the head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dflash_ext.drafter import Drafter, DrafterConfig
from dflash_ext.drafter_rules import SLIDING
from dflash_ext.errors import UserError
from dflash_ext.export_check import StoredDrafter
from dflash_ext.target import Vocabulary

NEAR, FAR = (0, 1, 7, 40), (4095, 8191)
"""Positions of the anchors: causality at the start, RoPE and the window far from it."""
HEAD_ROWS = 4096
"""Rows of the target's head whose logits exist at one time."""


@dataclass(frozen=True)
class Passage:
    """Blocks in one random document, whose first row stands at position `first`."""

    anchors: tuple[int, ...]
    first: int
    tolerance: float
    """Largest difference of logits allowed, over the largest logit."""


def passages(config: DrafterConfig) -> list[Passage]:
    """What is compared. T is the last anchor, so memory is that of 8,191 context rows at most.

    A position p costs about p * 2**-24 rad of fp32 angle. Measured on a drafter of SmolLM2's widths
    (5 layers, window 2048): 8e-6 at NEAR, 1e-4 at the window and at FAR; a window that is off by
    one: 2e-2. The end of the positions tells only gross errors.
    """
    window = config.sliding_window if SLIDING in config.layer_types else None
    edges = set() if window is None or window >= FAR[-1] else {window - 1, window, window + 1}
    near = {*NEAR, *(edge for edge in edges if edge <= 64)}
    last = config.max_position_embeddings - config.block_size - 8
    return [
        Passage(tuple(sorted(near)), 0, 2e-4),
        Passage(tuple(sorted({*NEAR[:2], *FAR} | edges - near)), 0, 2e-3),
        Passage((2, 8), max(last, 0), 2e-2),
    ]


@torch.no_grad()
def prove_stored(parameters: Mapping[str, Tensor], stored: StoredDrafter, directory: Path) -> None:
    """UserError unless every parameter is stored as its own bf16 rounding, and nothing else is."""
    if odd := stored.names.symmetric_difference(parameters):
        raise UserError(f"export {directory}: stored and trained tensors differ in {sorted(odd)}")
    for name, parameter in parameters.items():
        if not torch.equal(stored.stored(name), parameter.detach().to("cpu", torch.bfloat16)):
            raise UserError(f"export {directory}: {name} is not stored as trained")


@torch.no_grad()
def prove_forward(
    reloaded: Drafter, stored: StoredDrafter, directory: Path, vocabulary: Vocabulary | None = None
) -> float:
    """UserError unless our forward and the independent one agree; their largest difference.

    In fp32 on the CPU. vocabulary: the target's, for block tokens and logits as in use; without it
    random rows stand for both.
    """
    largest = 0.0
    for passage in passages(reloaded.config):
        ours, theirs = _both_forwards(reloaded, stored, passage, vocabulary)
        error = _logit_error(ours, theirs, vocabulary)
        if not error <= passage.tolerance:  # NaN fails too
            raise UserError(
                f"export {directory}: logits of an independent forward differ by {error:.1e} of "
                f"the largest one (allowed {passage.tolerance:.0e}) at anchors "
                f"{list(passage.anchors)} from position {passage.first}; the export is not usable"
            )
        largest = max(largest, error)
    return largest


def _both_forwards(
    drafter: Drafter, stored: StoredDrafter, passage: Passage, vocabulary: Vocabulary | None
) -> tuple[Tensor, Tensor]:
    """Hidden rows [N, B, H] of a random document: by `drafter`, and independently."""
    config, anchors, first = drafter.config, passage.anchors, passage.first
    N, T = len(anchors), max(anchors)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(T, config.feature_width, generator=generator)
    embeds = _embeddings(config, N, generator, vocabulary)
    masks = embeds[N:].expand(N, config.block_size - 1, -1)
    blocks = torch.cat([embeds[:N, None], masks], dim=1)
    starts = torch.zeros(N, dtype=torch.int32)
    ends = torch.tensor(anchors, dtype=torch.int32)
    slots = torch.tensor(anchors)[:, None] + torch.arange(config.block_size) + first
    ours = drafter(
        embeds,
        drafter.encode_context(features),
        slots.flatten(),
        torch.arange(T) + first,
        drafter.layouts(starts, ends, T),
    )
    return ours.view_as(blocks), stored.hidden(features, anchors, blocks, first)


def _embeddings(
    config: DrafterConfig, N: int, generator: torch.Generator, vocabulary: Vocabulary | None
) -> Tensor:
    """[N+1, H]: of a random token for each block, and of the mask token."""
    if vocabulary is None:
        return torch.randn(N + 1, config.hidden_size, generator=generator)
    embedding, head = vocabulary
    ids = torch.randint(head.shape[0], (N + 1,), generator=generator)
    ids[N] = config.mask_token_id
    return embedding[ids.to(embedding.device)].to("cpu", torch.float32)


def _heads(H: int, vocabulary: Vocabulary | None) -> Iterator[Tensor]:
    """The head in pieces [<= HEAD_ROWS, H]: fp32, on the CPU."""
    if vocabulary is None:
        yield torch.randn(256, H, generator=torch.Generator().manual_seed(1))
        return
    for piece in vocabulary.head.split(HEAD_ROWS):
        yield piece.to("cpu", torch.float32)


def _logit_error(ours: Tensor, theirs: Tensor, vocabulary: Vocabulary | None) -> float:
    """Largest difference of the logits of hidden rows [N, B, H], over the largest logit."""
    difference, largest = torch.zeros(()), torch.zeros(())
    for head in _heads(ours.shape[-1], vocabulary):
        a, b = ours @ head.T, theirs @ head.T
        difference = torch.maximum(difference, (a - b).abs().max())
        largest = torch.maximum(largest, b.abs().max())
    return float(difference / largest)
