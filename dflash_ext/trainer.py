"""One micro-batch and one validation: features and anchors in, gradients and sums out.

Shapes: T context tokens, N blocks, B slots, H hidden, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_ext.batch import PackedBatch
from dflash_ext.blocks import Blocks, build_blocks, draw_anchors, resolve_gamma
from dflash_ext.config import TrainConfig
from dflash_ext.drafter import Drafter
from dflash_ext.errors import UserError
from dflash_ext.loss import LossOutput, vocabulary_loss, vocabulary_topk
from dflash_ext.metrics import TREE_BUDGETS, slot_sums, summarise, tree_sums
from dflash_ext.plan import plan_epoch
from dflash_ext.samples import Samples
from dflash_ext.target import Target
from dflash_ext.transfer import FeatureBatch

KEPT_FEATURE_BYTES = 512 * 2**20
"""Validation features up to this size are computed once and kept."""


class Trainer:
    """The drafter's side of a step, for one target."""

    def __init__(self, target: Target, drafter: Drafter, config: TrainConfig) -> None:
        self.target, self.drafter, self.config = target, drafter, config
        self.embedding, self.head = target.vocabulary()
        self.gamma = resolve_gamma(config.loss.gamma, drafter.config.block_size)

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

    def features(self, batch: PackedBatch) -> FeatureBatch:
        """Verified features of a batch; FeatureError if they are not the batch's own."""
        features = self.target.features(batch)
        config = self.drafter.config
        features.verify(batch, config.target_layer_ids, config.target_hidden_size)
        return features

    def hidden(self, features: FeatureBatch, batch: PackedBatch, blocks: Blocks) -> Tensor:
        """The drafter's rows [N*B, H] for `blocks`, which are on the features' device."""
        return self.drafter(
            F.embedding(blocks.input_ids, self.embedding),
            self.drafter.encode_context(features.features),
            blocks.positions,
            batch.positions().to(blocks.positions.device, non_blocking=True),
            self.drafter.layouts(blocks.ctx_start, blocks.ctx_end, batch.num_tokens),
        )

    def loss(self, hidden: Tensor, blocks: Blocks) -> LossOutput:
        """The objective over the supervised rows of `hidden` [N*B, H]."""
        options = self.config.loss
        return vocabulary_loss(
            hidden.index_select(0, blocks.rows),
            self.head,
            blocks.labels.flatten()[blocks.rows],
            blocks.weights.flatten()[blocks.rows],
            rows_per_block=blocks.rows_per_block,
            kind=options.kind,
            alpha=options.alpha,
            chunk_rows=options.chunk_rows,
        )

    def micro_step(self, features: FeatureBatch, batch: PackedBatch, blocks: Blocks) -> Tensor:
        """Add the gradient of the loss numerator to the parameters; returns `slot_sums`.

        `blocks` on the CPU, with at least one supervised row.
        """
        blocks = blocks.to(features.features.device)
        output = self.loss(self.hidden(features, batch, blocks), blocks)
        output.numerator.backward()
        return slot_sums(output, blocks)


class Validation:
    """Held-out samples with one fixed anchor draw, the same in every run and at every step."""

    def __init__(self, trainer: Trainer, samples: Samples) -> None:
        """Any number of samples, also none: `run` then returns nothing."""
        self.trainer = trainer
        options, store, chosen = trainer.config.batch, samples.store, samples.indices
        per_sequence = max(1, trainer.config.eval.max_validation_blocks // max(1, len(chosen)))
        per_sequence = min(per_sequence, options.anchors_per_sequence)
        plan = (
            []
            if not len(chosen)
            else plan_epoch(
                store.lengths[chosen],
                np.minimum(store.candidates[chosen], per_sequence),
                seed=0,
                epoch=0,
                token_budget=options.token_budget,
                max_documents=options.max_documents,
                anchor_budget=options.anchor_budget,
            )
        )
        self._batches: list[tuple[PackedBatch, Blocks]] = []
        for group in plan:
            batch = store.batch(chosen[group].tolist())
            anchors = draw_anchors(batch, anchors_per_sequence=per_sequence, seed=0, epoch=0)
            if len(anchors):
                self._batches.append((batch, trainer.blocks(batch, anchors)))
        self._kept: dict[int, FeatureBatch] = {}
        width = trainer.drafter.config.feature_width * trainer.embedding.element_size()
        tokens = sum(batch.num_tokens for batch, _ in self._batches)
        self._keep = tokens * width <= KEPT_FEATURE_BYTES

    def _features(self, index: int) -> FeatureBatch:
        if index in self._kept:
            return self._kept[index]
        features = self.trainer.features(self._batches[index][0])
        if self._keep:
            self._kept[index] = features
        return features

    @torch.no_grad()
    def run(self) -> dict[str, float]:
        """`metrics.summarise` over the held-out blocks, and tree_accept_len@budget beside it."""
        drafter, head = self.trainer.drafter, self.trainer.head
        B = drafter.config.block_size
        top = min(max(TREE_BUDGETS), head.shape[0])
        sums: Tensor | None = None
        trees = dict.fromkeys(TREE_BUDGETS, 0.0)
        for index, (batch, blocks) in enumerate(self._batches):
            features = self._features(index)
            on_device = blocks.to(features.features.device)
            hidden = self.trainer.hidden(features, batch, on_device)
            part = slot_sums(self.trainer.loss(hidden, on_device), on_device)
            sums = part if sums is None else sums + part
            slots = hidden.view(-1, B, hidden.shape[-1])[:, 1:].flatten(0, 1)
            chunk_rows = self.trainer.config.loss.chunk_rows
            log_probs, ids = vocabulary_topk(slots, head, top, chunk_rows=chunk_rows)
            shape = (blocks.num_blocks, B - 1, top)
            found = tree_sums(log_probs.cpu().view(shape), ids.cpu().view(shape), blocks)
            trees = {budget: trees[budget] + found[budget] for budget in trees}
        if sums is None:
            return {}
        metrics = summarise(sums.tolist(), B)
        if blocks_used := metrics["blocks"]:
            for budget, total in trees.items():
                metrics[f"tree_accept_len@{budget}"] = total / blocks_used
        return metrics
