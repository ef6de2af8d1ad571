"""One micro-batch and one validation: features and anchors in, gradients and sums out.

Shapes: T context tokens, N blocks, B slots, H hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_ext.batch import PackedBatch
from dflash_ext.blocks import Blocks, build_blocks, draw_anchors, resolve_gamma
from dflash_ext.config import TrainConfig
from dflash_ext.drafter import Drafter
from dflash_ext.errors import UserError
from dflash_ext.fp8 import check_device
from dflash_ext.layers import fixed_weights, let_casts_go
from dflash_ext.loss import (
    LossOutput,
    Teacher,
    needs_teacher,
    quantised_head,
    vocabulary_loss,
    vocabulary_topk,
)
from dflash_ext.metrics import TREE_BUDGETS, slot_sums, summarise, sums_size, tree_sums
from dflash_ext.ops.quantise import Quantised
from dflash_ext.placement import to_device
from dflash_ext.plan import plan_epoch
from dflash_ext.samples import Samples
from dflash_ext.shield import shield
from dflash_ext.target import Vocabulary
from dflash_ext.transfer import FeatureBatch, with_last_layer

KEPT_FEATURE_BYTES = 512 * 2**20
"""Validation features up to this size are computed once and kept."""


class Inputs(NamedTuple):
    """What one forward of the drafter needs, on its device."""

    blocks: Blocks
    """Over the context rows below."""
    features: Tensor
    """[T, K*Ht] of the rows that some block sees."""
    positions: Tensor
    """int64 [T], inside the documents."""
    teacher: Teacher | None
    """For losses against the target's distribution."""


class DrafterForward(nn.Module):
    """The drafter's whole forward as one module: what is sharded is gathered around this call."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter
        shield(self)

    def forward(self, embeds: Tensor, inputs: Inputs, rows: Tensor | None) -> Tensor:
        """Hidden rows [R, H], or [N*B, H] without `rows`, of embeddings [N+1, H]."""
        blocks, features, positions, _ = inputs
        return self.drafter(
            embeds,
            self.drafter.encode_context(features),
            blocks.positions,
            positions,
            self.drafter.layouts(
                blocks.ctx_start, blocks.ctx_end, features.shape[0], blocks.visible_rows
            ),
            rows,
        )


class Trainer:
    """The drafter's side of a step."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        drafter: Drafter,
        config: TrainConfig,
        final_norm: nn.Module | None = None,
    ) -> None:
        """vocabulary: the target's embedding and head, on the drafter's device.

        final_norm: the target's (`teacher.final_norm`), for losses against its distribution.
        """
        assert needs_teacher(config.loss.kind) == (final_norm is not None)
        self.drafter, self.config = drafter, config
        self.embedding, self.head = vocabulary
        self.final_norm = final_norm
        self.head_fp8 = _quantised(self.head) if config.loss.fp8_head else None
        self.gamma = resolve_gamma(config.loss.gamma, drafter.config.block_size)
        self.forward = DrafterForward(drafter)

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def handed_taps(self) -> tuple[int, ...]:
        """Taps of a feature batch: the drafter's own and, for some losses, the target's last."""
        config = self.drafter.config
        if self.final_norm is None:
            return config.target_layer_ids
        assert config.num_target_layers is not None  # `build_drafter` knows it from the target
        return with_last_layer(config.target_layer_ids, config.num_target_layers)

    @property
    def handed_width(self) -> int:
        """Columns of a feature batch."""
        return len(self.handed_taps) * self.drafter.config.target_hidden_size

    def blocks(self, batch: PackedBatch, anchors: Tensor) -> Blocks:
        """Blocks of the anchors on the CPU. UserError if a token is outside the vocabulary."""
        largest = int(batch.input_ids.max())
        if largest >= self.head.shape[0]:
            raise UserError(
                f"samples {list(batch.sample_ids)} hold token id {largest}, the target's vocabulary"
                f" ends at {self.head.shape[0] - 1}: the data was made with another tokenizer"
            )
        return build_blocks(
            batch,
            anchors,
            block_size=self.drafter.config.block_size,
            mask_token_id=self.drafter.config.mask_token_id,
            gamma=self.gamma,
            contiguous=self.config.loss.contiguous,
        )

    def inputs(self, features: FeatureBatch, batch: PackedBatch, blocks: Blocks) -> Inputs:
        """`blocks`, which are on the CPU, and the part of the context that they see."""
        own, teacher = self.drafter.config.feature_width, None
        values, last = features.features[:, :own], features.features[:, own:]
        if self.final_norm is not None:
            predicting = to_device(blocks.predicting_rows, last.device)
            teacher = Teacher(last, predicting, self.final_norm)
        rows, blocks = blocks.narrowed(self.drafter.config.context_window)
        positions = batch.positions()[rows]
        if isinstance(rows, slice):
            seen = values[rows]
        else:
            seen = values.index_select(0, to_device(rows, values.device))
        positions = to_device(positions, values.device)
        return Inputs(blocks.to(values.device), seen, positions, teacher)

    def hidden(self, inputs: Inputs, *, supervised: bool) -> Tensor:
        """The drafter's rows: [R, H] of the supervised slots, or [N*B, H]."""
        blocks = inputs.blocks
        embeds = F.embedding(blocks.input_ids, self.embedding)
        return self.forward(embeds, inputs, blocks.rows if supervised else None)

    def loss(self, hidden: Tensor, inputs: Inputs) -> LossOutput:
        """The objective over the supervised rows [R, H]."""
        options, blocks = self.config.loss, inputs.blocks
        return vocabulary_loss(
            hidden,
            self.head,
            blocks.labels.flatten()[blocks.rows],
            blocks.weights.flatten()[blocks.rows],
            rows_per_block=blocks.rows_per_block,
            kind=options.kind,
            alpha=options.alpha,
            chunk_rows=options.chunk_rows,
            teacher=inputs.teacher,
            head_fp8=self.head_fp8,
        )

    def no_sums(self) -> Tensor:
        """What `micro_step` returns for no blocks at all: zeros, on the device."""
        return torch.zeros(sums_size(self.drafter.config.block_size), device=self.device)

    def micro_step(self, features: FeatureBatch, batch: PackedBatch, blocks: Blocks) -> Tensor:
        """Add the gradient of the loss numerator to the parameters; returns `slot_sums`.

        `blocks` on the CPU; more than `anchor_chunk` of them take several backward passes.
        """
        total = self.no_sums()
        parts = list(blocks.chunks(self.config.batch.blocks_at_once))
        with fixed_weights(self.drafter):
            for part in parts:
                if part is parts[-1]:
                    let_casts_go(self.drafter)
                inputs = self.inputs(features, batch, part)
                output = self.loss(self.hidden(inputs, supervised=True), inputs)
                output.numerator.backward()
                total += slot_sums(output, inputs.blocks)
        return total

    def zero_step(self) -> None:
        """A backward pass over one block whose gradient is zero."""
        B, config = self.drafter.config.block_size, self.drafter.config
        ids = torch.zeros(B + 1, dtype=torch.int64)
        batch = PackedBatch.from_documents([(ids, torch.ones_like(ids))], [0])
        blocks = self.blocks(batch, torch.ones(1, dtype=torch.int64))
        ones = self.embedding.new_ones(B + 1, config.feature_width)
        features = FeatureBatch(ones, config.target_layer_ids, (0,), "", B + 1)
        hidden = self.hidden(self.inputs(features, batch, blocks), supervised=True)
        (hidden.sum() * 0).backward()


def _quantised(head: Tensor) -> Quantised:
    check_device(head.device, "--loss.fp8-head")
    if head.dtype != torch.bfloat16:
        raise UserError(
            f"--loss.fp8-head needs a drafter that computes in bf16, this one in {head.dtype}: "
            "leave it out, or add --target.dtype bf16"
        )
    return quantised_head(head)


class Validation:
    """Held-out samples with one fixed anchor draw, the same in every run and at every step.

    The batches are the same on every rank; each drafter takes those that are its own, and the sums
    of all drafters make the metrics.
    """

    def __init__(self, config: TrainConfig, samples: Samples, row_bytes: int) -> None:
        """Any number of samples, also none: `run` then returns nothing.

        row_bytes: size of the features of one token.
        """
        options, store, chosen = config.batch, samples.store, samples.indices
        per_sequence = max(1, config.eval.max_validation_blocks // max(1, len(chosen)))
        self.per_sequence = min(per_sequence, options.anchors_per_sequence)
        candidates = np.minimum(store.candidates[chosen], self.per_sequence)
        plan = (
            []
            if not len(chosen)
            else plan_epoch(
                store.lengths[chosen],
                candidates,
                seed=0,
                epoch=0,
                token_budget=options.token_budget,
                max_documents=options.max_documents,
                anchor_budget=options.anchor_budget,
            )
        )
        self._store, self._config = store, config
        self._groups = [chosen[group].tolist() for group in plan if candidates[group].any()]
        tokens = int(sum(store.lengths[group].sum() for group in self._groups))
        self.keep = tokens * row_bytes <= KEPT_FEATURE_BYTES
        """Features are computed once and kept, by whoever uses them."""
        self._kept: dict[int, tuple[PackedBatch, FeatureBatch]] = {}

    def __len__(self) -> int:
        """Held-out batches."""
        return len(self._groups)

    def batch(self, index: int) -> PackedBatch:
        return self._store.batch(self._groups[index])

    def _taken(
        self, index: int, take: Callable[[int], tuple[PackedBatch, FeatureBatch]]
    ) -> tuple[PackedBatch, FeatureBatch]:
        if index not in self._kept:
            batch, features = take(index)
            if not self.keep:
                return batch, features
            # What was handed over lies in a buffer that the next batch will need.
            features = dataclasses.replace(features, features=features.features.clone())
            self._kept[index] = batch, features
        return self._kept[index]

    @torch.no_grad()
    def run(
        self,
        trainer: Trainer,
        own: Iterable[int],
        take: Callable[[int], tuple[PackedBatch, FeatureBatch]],
        reduce: Callable[[Tensor], Tensor] = lambda sums: sums,
    ) -> dict[str, float]:
        """`metrics.summarise` over the held-out blocks, and tree_accept_len@budget beside it.

        own: this drafter's batches; take: their features; reduce: the sum over all drafters.
        """
        if not self._groups:
            return {}
        drafter, head = trainer.drafter, trainer.head
        B, chunk_rows = drafter.config.block_size, self._config.loss.chunk_rows
        top = min(max(TREE_BUDGETS), head.shape[0])
        sums, trees = trainer.no_sums(), dict.fromkeys(TREE_BUDGETS, 0.0)
        for index in own:
            batch, features = self._taken(index, take)
            anchors = draw_anchors(batch, anchors_per_sequence=self.per_sequence, seed=0, epoch=0)
            blocks = trainer.blocks(batch, anchors)
            inputs = trainer.inputs(features, batch, blocks)
            hidden = trainer.hidden(inputs, supervised=False)
            output = trainer.loss(hidden.index_select(0, inputs.blocks.rows), inputs)
            sums += slot_sums(output, inputs.blocks)
            slots = hidden.view(-1, B, hidden.shape[-1])[:, 1:].flatten(0, 1)
            log_probs, ids = vocabulary_topk(slots, head, top, chunk_rows=chunk_rows)
            shape = (blocks.num_blocks, B - 1, top)
            found = tree_sums(log_probs.cpu().view(shape), ids.cpu().view(shape), blocks)
            trees = {budget: trees[budget] + found[budget] for budget in trees}
        tree_values = torch.tensor(list(trees.values()), device=sums.device)
        values = reduce(torch.cat([sums, tree_values])).tolist()
        metrics = summarise(values[: len(sums)], B)
        if blocks_used := metrics["blocks"]:
            for budget, total in zip(TREE_BUDGETS, values[len(sums) :]):
                metrics[f"tree_accept_len@{budget}"] = total / blocks_used
        return metrics
