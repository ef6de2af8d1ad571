"""What a step cost and who waited: floating point operations by arithmetic, shares by clocks.

Shapes: T context rows, N blocks, B slots, R supervised rows, L layers, H hidden, D head dim.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, fields

import torch

from dflash_ext.batch import PackedBatch
from dflash_ext.blocks import Blocks
from dflash_ext.drafter import DrafterConfig
from dflash_ext.loss import head_products
from dflash_ext.pipeline import Waits
from dflash_ext.target import Target
from dflash_ext.target_loading import decoder_layers, parameter_shapes
from dflash_ext.topology import Topology
from dflash_ext.trainer import Trainer
from dflash_ext.transformers_api import active_experts, head_dim


@dataclass(frozen=True)
class TargetCost:
    """Operations of a target's forward up to its last tap."""

    per_token: float
    per_pair: float
    """For each visible (query, key) pair of a document."""

    @classmethod
    def of(cls, target: Target) -> TargetCost:
        text = target.model.config.get_text_config()
        count = max(target.handed_taps) + 1
        layers = list(decoder_layers(target.model, target.num_layers))[:count]
        active = active_experts(text)
        weights = sum(  # of a layer that another rank loaded as well
            math.prod(shape) * (active if "expert" in name else 1.0)
            for layer in layers
            for name, shape in parameter_shapes(layer).items()
            if len(shape) > 1
        )
        return cls(2.0 * weights, 4.0 * text.num_attention_heads * head_dim(text) * count)

    def batch(self, batch: PackedBatch) -> float:
        n = batch.lengths().double()
        return float(batch.num_tokens * self.per_token + self.per_pair * (n * (n + 1) / 2).sum())


def drafter_operations(config: DrafterConfig, blocks: Blocks, products: int = 2) -> float:
    """Of one micro-batch, forward and backward: of what the loss depends on, nothing twice.

    Context rows that no block sees are not encoded; mask slots enter the first layer alike, so one
    row is projected for all; behind the last attention only supervised rows count. Features and
    the head get no gradient, so `fc` lacks one product of three and the head another. Windows are
    not taken off. `products` are the head's for each supervised row (`loss.head_products`).
    """
    H, D, L, B = config.hidden_size, config.head_dim, config.num_layers, config.block_size
    kv, q = config.num_kv_heads * D, config.num_heads * D
    T, N, R = blocks.context_rows, blocks.num_blocks, blocks.num_rows
    context = T * (4 * config.feature_width * H + 6 * L * 2 * H * kv)
    inputs = 6 * (N + 1 + (L - 1) * N * B) * H * (q + 2 * kv)
    outputs = 6 * (R + (L - 1) * N * B) * H * (q + 3 * config.intermediate_size)
    attention = 3.5 * 4 * q * B * (blocks.visible_rows + N * B) * L
    head = R * 2 * products * config.vocab_size * H
    return float(context + inputs + outputs + attention + head)


def product_tflops(device: torch.device, size: int = 8192) -> float | None:
    """TFLOP/s of a bf16 matrix product on a GPU, what MFU is a share of; None on a CPU."""
    if device.type != "cuda":
        return None
    a, b = torch.randn(2, size, size, device=device, dtype=torch.bfloat16).unbind()
    for repeat in (3, 10):  # the first ones warm up
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(repeat):
            a @ b
        torch.cuda.synchronize(device)
    return 2 * size**3 * repeat / (time.perf_counter() - began) / 1e12


@dataclass
class Tally:
    """What one drafter did in one optimizer step; tallies of all drafters add up."""

    tokens: float = 0.0
    """Of the feature batches, a draw's share of each."""
    anchors: float = 0.0
    target_tera: float = 0.0
    """Operations of the targets, in units of 1e12."""
    drafter_tera: float = 0.0
    stop: float = 0.0
    """More than 0 if a drafter was asked to stop."""
    waits: Waits = field(default_factory=Waits)

    def count(
        self,
        trainer: Trainer,
        cost: TargetCost,
        batch: PackedBatch,
        blocks: Blocks,
        draws: int,
    ) -> None:
        """Add one micro-batch, of `draws` from its feature batch."""
        self.tokens += batch.num_tokens / draws
        self.anchors += blocks.num_blocks
        self.target_tera += cost.batch(batch) / draws / 1e12
        products = head_products(trainer.config.loss.kind)
        operations = drafter_operations(trainer.drafter.config, blocks, products)
        self.drafter_tera += operations / 1e12

    def values(self) -> list[float]:
        own = [getattr(self, f.name) for f in fields(self) if f.name != "waits"]
        return own + self.waits.values()

    @classmethod
    def of(cls, values: list[float]) -> Tally:
        """Inverse of `values`."""
        tally, names = cls(), [f.name for f in fields(cls) if f.name != "waits"]
        for name, value in zip(names, values):
            setattr(tally, name, value)
        tally.waits = Waits(*values[len(names) :])
        return tally

    @classmethod
    def size(cls) -> int:
        return len(cls().values())


def rates(
    tally: Tally,
    seconds: float,
    topology: Topology,
    peak_tflops: float | None,
    target_devices: int = 1,
) -> dict[str, float | str]:
    """What is logged of a step: rates, shares of waiting, the side that limits, MFU.

    tally: of all drafters. Shares are of each side's own time: `wait_target`: of the targets' time,
    waiting for room; `wait_drafter` and `wait_transfer`: of the drafters' time, waiting for a
    capture or for a batch on its way. The limiting side is the one the others wait for.
    """
    waits, found = tally.waits, dict[str, float | str]()
    found["ktok_s"] = tally.tokens / seconds / 1e3
    found["anchors_s"] = tally.anchors / seconds
    if topology.shared:
        share = waits.capture / seconds
        found["share_target"] = share
        found["limit"] = "target" if share > 0.5 else "drafter"
    else:
        drafters = seconds * topology.drafters
        found["wait_target"] = waits.room / waits.elapsed if waits.elapsed else 0.0
        found["wait_drafter"] = waits.target / drafters
        found["wait_transfer"] = waits.transfer / drafters
        waiting = {
            "drafter": found["wait_target"],
            "target": found["wait_drafter"],
            "transfer": found["wait_transfer"],
        }
        found["limit"] = max(waiting, key=lambda side: float(waiting[side]))
    if peak_tflops:
        devices = topology.targets * target_devices
        found["mfu_target"] = tally.target_tera / (seconds * devices * peak_tflops)
        found["mfu_drafter"] = tally.drafter_tera / (seconds * topology.drafters * peak_tflops)
    return found
