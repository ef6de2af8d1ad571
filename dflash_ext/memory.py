"""Memory of a step as arithmetic on its budgets, and the batch that proves it (requirement 14)."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_ext.batch import PackedBatch
from dflash_ext.config import BatchOptions
from dflash_ext.drafter import DrafterConfig
from dflash_ext.ops.kept import image_bytes, image_counts, keeps, tiles_seen


def predict_peak(
    config: DrafterConfig,
    batch: BatchOptions,
    *,
    handed_width: int,
    logits_or_ds: int,
    drafter_parameters: int,
    target_parameters: int,
    bytes_per_value: int,
    moments: int,
) -> dict[str, int]:
    """Bytes of each part of a step at its largest; their sum is the predicted peak.

    A function of the token budget and the blocks of one backward, never of the data.
    `handed_width`: columns of a feature batch; `logits_or_ds`: bytes of the loss's workspace
    (`loss.workspace_bytes`) or of a layer's dS (`largest_ds`), whichever is more: the one is
    gone before the other comes.
    `bytes_per_value` of the compute dtype (2 or 4), `moments`: fp32 optimizer values per parameter
    (Muon 1, AdamW 2).
    Activations are the tensors that autograd keeps for one turn of blocks (layers.py says which it
    does not), and the largest that one layer's backward has beside them.
    """
    w, T, rows = bytes_per_value, batch.token_budget, batch.blocks_at_once * config.block_size
    H, D, F = config.hidden_size, config.head_dim, config.intermediate_size
    kv, q = config.num_kv_heads * D, config.num_heads * D
    per_context_row = 3 * kv * w  # K before and after norm and RoPE, V
    # The residual stream twice, Q and K before and after, V, attention's result and lse, gate, up.
    per_block_row = (2 * H + 3 * q + 3 * kv + 2 * F) * w + config.num_heads * 4
    rope = (T + rows) * D * 4
    # Between the turns of a step the casts of the weights are kept (layers.py).
    several = batch.anchor_budget > batch.blocks_at_once
    cast = drafter_parameters * w if w < 4 and several else 0
    return {
        "target weights": target_parameters * w,
        "drafter weights, gradients, moments": drafter_parameters * 4 * (2 + moments) + cast,
        "features": 2 * T * handed_width * w + T * 2 * H * w,
        "drafter activations": config.num_layers * (T * per_context_row + rows * per_block_row)
        + rope,
        "one layer's backward": rows * (3 * F + 2 * H) * w,
        "a chunk of logits or a layer's dS": logits_or_ds,
    }


def largest_ds(config: DrafterConfig, batch: BatchOptions, max_length: int) -> int:
    """Bytes of dS that a turn's backward keeps at most, were there no limit: every block at the end
    of a document of `max_length` tokens. 0 for shapes of which none is kept."""
    gqa_ratio = config.num_heads // config.num_kv_heads
    if not keeps(config.block_size, gqa_ratio, config.head_dim):
        return 0
    blocks, length = batch.blocks_at_once, min(max_length, batch.token_budget)
    counts = image_counts(
        tiles_seen=tiles_seen(blocks * length, blocks, config.context_window or length),
        num_ctx=batch.token_budget,
        num_blocks=blocks,
        block_size=config.block_size,
        kv_heads=config.num_kv_heads,
        gqa_ratio=gqa_ratio,
    )
    return image_bytes(counts.total)


def largest_batch(
    options: BatchOptions,
    *,
    max_length: int,
    block_size: int,
    vocab_size: int,
    limit: int | None = None,
) -> tuple[PackedBatch, Tensor]:
    """The largest batch the budgets allow, and anchors of it (int64 [N]).

    Of the anchors `limit`, or by default those of two backward passes (turns), the first of them
    full: it keeps the casts of the weights for the second (layers.py), and no turn takes more
    memory. Documents of equal length fill the token budget; every token is supervised, and anchors
    stand where their whole block is, so that no step has more supervised rows.
    """
    documents = max(1, min(options.max_documents, options.token_budget // 2))
    length = max(2, min(max_length, options.token_budget // documents))
    ids = torch.arange(length) % vocab_size
    supervised = torch.ones(length, dtype=torch.bool)
    batch = PackedBatch.from_documents([(ids, supervised)] * documents, range(documents))
    per_document, turn = min(options.anchors_per_sequence, length - 1), options.blocks_at_once
    counts = [per_document] * documents
    whole, rest = divmod(turn, per_document)
    if limit is None and rest and whole < documents:
        counts[whole] = rest  # the first turn ends with this document
    last = max(per_document, length - block_size + 1)  # anchors before it see a whole block
    anchors = torch.cat(
        [d * length + torch.arange(last - count, last) for d, count in enumerate(counts)]
    )
    return batch, anchors[: limit or min(2 * turn, options.anchor_budget)]
