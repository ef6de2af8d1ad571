"""What `bench step` trains on: published drafters' shapes, random weights, features and tokens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from dflash_ext.batch import PackedBatch
from dflash_ext.bench.shapes import lognormal_documents
from dflash_ext.blocks import Blocks, anchor_candidates
from dflash_ext.config import RECIPES, BatchOptions, LossOptions, TrainConfig
from dflash_ext.drafter import FULL, SLIDING, Drafter, DrafterConfig
from dflash_ext.target import Vocabulary
from dflash_ext.trainer import Trainer
from dflash_ext.transfer import FeatureBatch

# semantics.md, "Checkpoint": the drafters published for these targets.
QWEN3_8B = DrafterConfig(
    hidden_size=4096,
    num_layers=5,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=12288,
    vocab_size=151936,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position_embeddings=40960,
    layer_types=(FULL,) * 5,
    block_size=16,
    mask_token_id=151669,
    target_layer_ids=(1, 9, 17, 25, 33),
    num_target_layers=36,
    target_hidden_size=4096,
)
QWEN36_27B = dataclasses.replace(
    QWEN3_8B,
    hidden_size=5120,
    target_hidden_size=5120,
    intermediate_size=17408,
    vocab_size=248320,
    rope_theta=1e7,
    layer_types=(SLIDING,) * 4 + (FULL,),
    sliding_window=2048,
    mask_token_id=248070,
    target_layer_ids=(1, 16, 31, 46, 61),
    num_target_layers=64,
)
SMALL = dataclasses.replace(
    QWEN3_8B,
    hidden_size=256,
    target_hidden_size=256,
    num_layers=3,
    layer_types=(SLIDING,) * 2 + (FULL,),
    sliding_window=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=768,
    vocab_size=8192,
    mask_token_id=8191,
)
DRAFTERS = {"qwen3-8b": QWEN3_8B, "qwen3.6-27b": QWEN36_27B, "small": SMALL}


@dataclass(frozen=True)
class Case:
    name: str
    drafter: str
    documents: tuple[int, ...]
    anchors: int

    @property
    def tokens(self) -> int:
        return sum(self.documents)


def cases(drafter: str) -> tuple[Case, ...]:
    """The measured batches of a shape."""
    if drafter == "small":
        return (Case("4 x 256, 16 anchors each", drafter, (256,) * 4, 64),)
    packed = lognormal_documents(49152, 1500)
    return (
        Case("1 x 4096, 512 anchors", drafter, (4096,), 512),
        Case("4 x 4096, 512 anchors each", drafter, (4096,) * 4, 2048),
        Case("49,152 packed, 4096 anchors", drafter, packed, 4096),
    )


def dtype_of(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def random_trainer(config: DrafterConfig, device: str, blocks_at_once: int) -> Trainer:
    """A trainer of a random drafter, with a random frozen embedding and head."""
    torch.manual_seed(0)
    shape = config.vocab_size, config.hidden_size
    with torch.device(device):
        embedding, head = (torch.randn(shape, dtype=dtype_of(device)) * 0.02 for _ in range(2))
        drafter = Drafter(config)
    batch = BatchOptions(anchor_budget=1 << 20, anchor_chunk=blocks_at_once)
    options: TrainConfig = dataclasses.replace(
        RECIPES["cpu"](), batch=batch, loss=LossOptions(chunk_rows=2048)
    )
    return Trainer(Vocabulary(embedding, head), drafter, options)


def random_batch(
    trainer: Trainer, documents: tuple[int, ...], anchors: int, seed: int = 0
) -> tuple[FeatureBatch, PackedBatch, Blocks]:
    """All tokens supervised; each document has anchors by its length, uniform over its own."""
    g = torch.Generator().manual_seed(seed)
    config = trainer.drafter.config
    batch = PackedBatch.random(documents, config.vocab_size, seed)
    candidates = anchor_candidates(batch).nonzero().flatten()
    # One of each `anchors` equal stretches of the candidates.
    count = min(anchors, len(candidates))
    bounds = torch.arange(count + 1) * len(candidates) // max(count, 1)
    drawn = torch.rand(len(bounds) - 1, generator=g, dtype=torch.float64) * bounds.diff()
    chosen = candidates[bounds[:-1] + drawn.long()]
    embedding = trainer.embedding
    values = torch.randn(
        batch.num_tokens, config.feature_width, device=embedding.device, dtype=embedding.dtype
    )
    features = FeatureBatch(
        values, config.target_layer_ids, batch.sample_ids, batch.token_hash(), batch.num_tokens
    )
    return features, batch, trainer.blocks(batch, chosen)
