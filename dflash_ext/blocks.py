"""Anchors, blocks, labels and weights: pure functions of a packed batch, on the CPU.

Everything whose shape depends on the data (which rows are supervised, how many per block) is
decided here, where reading a value costs nothing, so the device never has to be asked.
Shapes: T tokens, N blocks (= anchors), B slots per block, R supervised rows.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_ext.batch import PackedBatch
from dflash_ext.errors import UserError
from dflash_ext.placement import to_device

_GAMMA_BY_BLOCK_SIZE = {16: 7.0, 10: 5.0, 8: 4.0}


def check_gamma(gamma: float | None) -> None:
    """UserError unless gamma is None (uniform weights) or a finite number above 0."""
    if gamma is not None and not (math.isfinite(gamma) and gamma > 0):
        raise UserError(
            f"gamma {gamma} is not a finite number above 0: "
            "give a positive number, 'auto' (by block size) or 'none' (uniform weights)"
        )


def resolve_gamma(gamma: str | float | None, block_size: int) -> float | None:
    """The decay of the slot weights from its configured form: "auto", "none" or a number."""
    if gamma == "auto":
        return _GAMMA_BY_BLOCK_SIZE.get(block_size, block_size / 2.3)
    if gamma is None or gamma == "none":
        return None
    try:
        value = float(gamma)
    except ValueError:
        raise UserError(
            f"gamma '{gamma}' is not a number: give a positive number, 'auto' or 'none'"
        ) from None
    check_gamma(value)
    return value


def slot_weights(block_size: int, gamma: float | None) -> Tensor:
    """float32 [B]: exp(-(k-1)/gamma) for slot k, 0 for the anchor's slot; gamma None: all 1."""
    check_gamma(gamma)
    k = torch.arange(block_size, dtype=torch.float64)
    decay = torch.ones_like(k) if gamma is None else torch.exp(-(k - 1) / gamma)
    return torch.where(k > 0, decay, 0.0).float()


def anchor_candidates(batch: PackedBatch) -> Tensor:
    """bool [T]: rows a with loss_mask[a] and loss_mask[a + 1], both in the same document."""
    candidates = batch.loss_mask.clone()
    candidates[:-1] &= batch.loss_mask[1:]
    candidates[batch.doc_starts[1:] - 1] = False  # the last row of a document has no next token
    return candidates


def draw_anchors(
    batch: PackedBatch, *, anchors_per_sequence: int, seed: int, epoch: int, draw: int = 0
) -> Tensor:
    """int64 [N]: sorted packed rows, up to `anchors_per_sequence` of each document's candidates.

    Uniform without replacement. Each document has its own Philox stream keyed by (seed, epoch,
    sample id, draw), so neither ranks, batch mates nor restarts change its anchors. The batch's
    anchor budget is kept by the plan (plan.py), which counts min(candidates, per sequence): a cap
    applied here would make the draw depend on the batch mates.
    """
    if anchors_per_sequence < 1:
        raise UserError(f"anchors_per_sequence {anchors_per_sequence} must be at least 1")
    candidates = anchor_candidates(batch).numpy()
    bounds = batch.doc_starts.tolist()
    drawn = []
    for sample, start, end in zip(batch.sample_ids, bounds, bounds[1:]):
        rows = start + np.flatnonzero(candidates[start:end])
        if len(rows) > anchors_per_sequence:
            key = np.random.SeedSequence((seed, epoch, sample, draw))
            order = np.random.Generator(np.random.Philox(key)).permutation(len(rows))
            rows = np.sort(rows[order[:anchors_per_sequence]])
        drawn.append(rows)
    return torch.from_numpy(np.concatenate(drawn).astype(np.int64))


# Rows that nobody sees are left out where they are more than this share: encoding a row costs about
# 40 times as much as copying its features (0.6 GFLOP against 80 KB at Qwen3-8B's shape on an H200).
GATHER_SHARE = 1 / 40


def _turns(starts: list[int], size: int) -> Iterator[tuple[int, int]]:
    """(first, end) of turns of at most `size` blocks whose documents begin at `starts`."""
    first, N = 0, len(starts)
    while first < N:
        end = min(first + size, N)
        if end < N and starts[end] != starts[first]:
            end = bisect_left(starts, starts[end], first, end)
        yield first, end
        first = end


def visible_rows(ctx_start: Tensor, ctx_end: Tensor) -> int:
    """The sum of ctx_end - ctx_start over blocks that are no padding, of tensors on the CPU."""
    return int((ctx_end.long() - ctx_start.long()).clamp(min=0).sum())


@dataclass(frozen=True)
class Blocks:
    """The N blocks of one packed batch: the drafter's inputs, labels and weights."""

    anchors: Tensor
    """int64 [N]: packed row of each anchor, rising."""
    ctx_start: Tensor
    """int32 [N]: first row of the anchor's document."""
    ctx_end: Tensor
    """int32 [N]: the anchor's own row; context rows ctx_start .. ctx_end - 1 are visible."""
    input_ids: Tensor
    """int64 [N+1]: each anchor's token (slot 0 of its block), then the mask token (all others)."""
    positions: Tensor
    """int64 [N*B]: position of each slot inside its own document."""
    labels: Tensor
    """int64 [N, B]: the token at row a + k, or -1 where the slot is not supervised."""
    weights: Tensor
    """float32 [N, B]: loss weight of each slot, 0 where not supervised."""
    rows: Tensor
    """int64 [R]: flat indices into N*B of the supervised slots, rising."""
    rows_per_block: tuple[int, ...]
    """N counts that sum to R: supervised slots of each block, on the host."""
    visible_rows: int
    """At least the sum of ctx_end - ctx_start over the blocks, on the host."""
    block_size: int

    @property
    def num_blocks(self) -> int:
        return len(self.rows_per_block)

    @property
    def num_rows(self) -> int:
        return sum(self.rows_per_block)

    @property
    def context_rows(self) -> int:
        """Context rows that some block sees (as if no layer had a window)."""
        first = self._first()
        return int((self.ctx_end[first.roll(-1)].long() - self.ctx_start[first].long()).sum())

    def _first(self) -> Tensor:
        """bool [N]: is the block the first of its document?"""
        first = torch.ones(self.num_blocks, dtype=torch.bool, device=self.ctx_start.device)
        first[1:] = self.ctx_start[1:] != self.ctx_start[:-1]
        return first

    @property
    def predicting_rows(self) -> Tensor:
        """int64 [R]: the target's packed row that predicts the token of each supervised slot.

        The token of slot k stands at row a + k, so it is row a + k - 1 that predicts it.
        """
        return self.anchors[self.rows // self.block_size] + self.rows % self.block_size - 1

    def chunks(self, size: int) -> Iterator[Blocks]:
        """The same blocks in turns of at most `size`, on the CPU; turns without a label left out.

        Gradients and sums of the turns add up to those of the whole. A turn ends with a document
        where it can: the context of a document that is cut has to be encoded twice.
        """
        B, starts = self.block_size, self.ctx_start.tolist()
        bounds = torch.tensor([0, *self.rows_per_block]).cumsum(0).tolist()
        for first, end in _turns(starts, size):
            if bounds[end] == bounds[first]:
                continue
            blocks, slots = slice(first, end), slice(first * B, end * B)
            yield Blocks(
                anchors=self.anchors[blocks],
                ctx_start=self.ctx_start[blocks],
                ctx_end=self.ctx_end[blocks],
                input_ids=torch.cat([self.input_ids[blocks], self.input_ids[-1:]]),
                positions=self.positions[slots],
                labels=self.labels[blocks],
                weights=self.weights[blocks],
                rows=self.rows[bounds[first] : bounds[end]] - first * B,
                rows_per_block=self.rows_per_block[blocks],
                visible_rows=visible_rows(self.ctx_start[blocks], self.ctx_end[blocks]),
                block_size=B,
            )

    def narrowed(self, window: int | None = None) -> tuple[slice | Tensor, Blocks]:
        """The context rows that any of these blocks sees, and the blocks over those rows alone.

        A slice if next to nothing lies between them, else int64 indices. window: that of the
        widest layer, None if one is not sliding. On the CPU.
        """
        start, end, first = self.ctx_start.long(), self.ctx_end.long(), self._first()
        document = first.cumsum(0) - 1
        begin = start[first] if window is None else torch.maximum(start, end - window + 1)[first]
        stop = end[first.roll(-1)]  # the last block's: ends rise
        sizes = stop - begin
        kept, hull = int(sizes.sum()), int(stop[-1] - begin[0])
        if hull - kept <= hull * GATHER_SHARE:
            offset = begin[:1].expand_as(begin)
            rows: slice | Tensor = slice(int(begin[0]), int(stop[-1]))
        else:
            offset = begin - (sizes.cumsum(0) - sizes)
            rows = torch.arange(kept) + offset.repeat_interleave(sizes)
        shift = offset[document]
        return rows, dataclasses.replace(
            self,
            ctx_start=(begin[document] - shift).to(torch.int32),
            ctx_end=(end - shift).to(torch.int32),
        )

    def to(self, device: torch.device | str) -> Blocks:
        """The same blocks with every tensor on `device`; the host does not wait for the copies."""
        moved: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                moved[field.name] = to_device(value, device)
        return dataclasses.replace(self, **moved)


def build_blocks(
    batch: PackedBatch,
    anchors: Tensor,
    *,
    block_size: int,
    mask_token_id: int,
    gamma: float | None,
    contiguous: bool = True,
) -> Blocks:
    """Blocks of the anchors (int64 [N], rising packed rows) of a batch, on the CPU.

    The label of slot k >= 1 is the token at row a + k, supervised if that row is in the anchor's
    document and in the loss mask. With `contiguous`, a slot after the block's first unsupervised
    one is not supervised either: at inference nothing behind a wrong slot is ever accepted.
    Raises UserError for a gamma that is neither None nor a finite number above 0.
    """
    if anchors.numel() and (
        anchors[0] < 0 or anchors[-1] >= batch.num_tokens or bool((anchors.diff() <= 0).any())
    ):
        raise ValueError(f"anchors must rise strictly inside 0..{batch.num_tokens - 1}")
    B = block_size
    weight_B = slot_weights(B, gamma)
    document = torch.searchsorted(batch.doc_starts[1:], anchors, right=True)
    start, end = batch.doc_starts[document], batch.doc_starts[document + 1]

    row_NB = anchors[:, None] + torch.arange(B)
    inside = row_NB < end[:, None]
    row_NB = row_NB.clamp(max=batch.num_tokens - 1)  # rows past the document are never labels
    supervised = inside & batch.loss_mask[row_NB]
    supervised[:, 0] = False
    if contiguous:
        supervised[:, 1:] = supervised[:, 1:].long().cumprod(1).bool()

    return Blocks(
        anchors=anchors,
        ctx_start=start.to(torch.int32),
        ctx_end=anchors.to(torch.int32),
        input_ids=F.pad(batch.input_ids[anchors], (0, 1), value=mask_token_id),
        positions=((anchors - start)[:, None] + torch.arange(B)).flatten(),
        labels=torch.where(supervised, batch.input_ids[row_NB], -1),
        weights=torch.where(supervised, weight_B, 0.0),
        rows=supervised.flatten().nonzero().flatten(),
        rows_per_block=tuple(supervised.sum(1).tolist()),
        visible_rows=visible_rows(start, anchors),
        block_size=B,
    )
