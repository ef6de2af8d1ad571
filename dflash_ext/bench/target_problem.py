"""What `bench target` reads: published targets' shapes with random weights, and batches for them.

Every model is cut behind the last of its default taps, as a target's checkpoint would be loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dflash_ext.plan import plan_epoch
from dflash_ext.taps import default_tap_ids
from dflash_ext.target import Target

BUDGET, CPU_BUDGET = 49152, 1024
DRAWN = 600
SIGMA = 0.7


@dataclass(frozen=True)
class Shape:
    model_type: str
    """As transformers calls it."""
    layers: int
    """Of the whole model."""
    options: Mapping[str, Any]
    """Of its config."""

    @property
    def tap_ids(self) -> tuple[int, ...]:
        return default_tap_ids(self.layers)

    @property
    def cut(self) -> int:
        """Layers up to the last tap."""
        return max(self.tap_ids) + 1


SHAPES = {
    "qwen3-8b": Shape(
        "qwen3",
        36,
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "qwen3-moe-30b-a3b": Shape(
        "qwen3_moe",
        48,
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "smollm2-135m": Shape(
        "llama",
        30,
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49152,
            "max_position_embeddings": 8192,
        },
    ),
    "tiny-qwen3": Shape(
        "qwen3",
        4,
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "vocab_size": 128,
            "max_position_embeddings": 8192,
        },
    ),
}
CUDA_SHAPES, CPU_SHAPES = ("qwen3-8b", "qwen3-moe-30b-a3b"), ("smollm2-135m",)


@dataclass(frozen=True)
class Case:
    name: str
    documents: tuple[int, ...]
    """Token counts."""


def drawn_lengths(count: int, mean: float, most: int, seed: int = 0) -> np.ndarray:
    """int64 [count], lognormal of this mean, from 1 to `most`."""
    draw = np.random.Generator(np.random.Philox(seed))
    lengths = draw.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, count)
    return np.clip(lengths.round(), 1, most).astype(np.int64)


def mixed_documents(budget: int, mean: float, most: int) -> tuple[int, ...]:
    """Lengths of one batch of the trainer's own plan over drawn documents."""
    lengths = drawn_lengths(DRAWN, mean, most)
    plan = plan_epoch(
        lengths,
        np.zeros_like(lengths),
        seed=0,
        epoch=0,
        token_budget=budget,
        max_documents=DRAWN,
        anchor_budget=1,
    )
    return tuple(lengths[plan[0]].tolist())


def cases(device: str) -> tuple[Case, ...]:
    """The measured batches: of one length, of a shorter one, of lengths as conversations have."""
    if device == "cuda":
        lengths, budget, mean, most = (4096, 1024), BUDGET, 1500, 8192
    else:
        lengths, budget, mean, most = (512, 128), CPU_BUDGET, 150, 512
    fixed = tuple(Case(f"{budget // n} x {n}", (n,) * (budget // n)) for n in lengths)
    return (*fixed, Case("length mix", mixed_documents(budget, mean, most)))


def random_target(
    shape: Shape, device: str, dtype: torch.dtype, *, accelerated: bool = True
) -> Target:
    """Weights drawn where they stay; accelerated as far as that agrees with the model, or not."""
    import transformers

    config = transformers.AutoConfig.for_model(
        shape.model_type, num_hidden_layers=shape.cut, tie_word_embeddings=False, **shape.options
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        )
    return Target(model, tap_ids=shape.tap_ids, accelerated=accelerated)
