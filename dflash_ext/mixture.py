"""A frozen mixture of experts on a packed batch: transformers' products, fewer visits of memory.

The router is the model's own; what follows it is `ops/grouped.py`. Shapes: T tokens, S rows of
tokens through their experts, H hidden.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dflash_ext.fp8 import Fp8Experts
from dflash_ext.module_parts import children_of, is_silu
from dflash_ext.ops.grouped import grouped_product, groups_run_on, mixed
from dflash_ext.ops.swiglu import swiglu_forward

_PARTS = {"gate", "experts"}
_WEIGHTS = {"gate_up_proj", "down_proj"}
# Families whose mixture is nothing but this: others add shared experts, biases or other scores.
FAMILIES = frozenset(["qwen3_moe"])


class Mixture:
    """What a mixture-of-experts block of a known family adds to the residual."""

    def __init__(self, module: Any) -> None:
        """module: one that `is_mixture` accepts; its weights stay where they are."""
        self._router, self._experts = module.gate, module.experts

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] of x [T, H]."""
        _, weights, chosen = self._router(x)
        # A bound method of our own kept here would be a cycle, and `Target.quantise` would leave
        # the experts in bf16 to Python's collector.
        in_fp8 = isinstance(self._experts, Fp8Experts)
        products = self._experts.products if in_fp8 else self._plain_products
        return mixed(chosen, weights, self._experts.num_experts, partial(products, x))

    def _plain_products(self, x: Tensor, token: Tensor, ends: Tensor, share: Tensor) -> Tensor:
        rows = x.index_select(0, token)
        gate, up = grouped_product(rows, self._experts.gate_up_proj, ends).chunk(2, dim=1)
        del rows
        act = swiglu_forward(gate, up)
        del gate, up
        act.mul_(share[:, None])  # here, because nowhere are the rows shorter
        return grouped_product(act, self._experts.down_proj, ends)


def is_mixture(module: nn.Module, model_type: str) -> bool:
    """Is it a block that `Mixture` computes, on a device that multiplies in groups?"""
    if model_type not in FAMILIES or children_of(module) != _PARTS:
        return False
    experts: Any = module.experts
    if isinstance(experts, Fp8Experts):
        return True
    weights = dict(experts.named_parameters())
    return (
        weights.keys() == _WEIGHTS
        and is_silu(experts.act_fn)
        and groups_run_on(weights["down_proj"].device, torch.bfloat16)
    )
