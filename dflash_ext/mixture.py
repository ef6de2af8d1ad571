"""A frozen mixture of experts on a packed batch: transformers' products, fewer visits of memory.

The router is the model's own. Then a token's rows are gathered for its experts, multiplied in
groups of one expert each, and summed. Shapes: T tokens, k experts a token, S = T * k rows, E
experts, H hidden, I intermediate of one expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dflash_ext.module_parts import children_of, is_silu
from dflash_ext.ops.grouped import grouped_product, multiplies_in_groups
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
        T, k = chosen.shape
        up_weights, down_weights = self._experts.gate_up_proj, self._experts.down_proj
        order, ends = by_expert(chosen.flatten(), len(up_weights))
        rows = x.index_select(0, order // k)
        gate, up = grouped_product(rows, up_weights, ends).chunk(2, dim=1)
        del rows
        act = swiglu_forward(gate, up)
        del gate, up
        # A row's share of its token is applied where rows are shortest.
        act.mul_(weights.flatten().index_select(0, order)[:, None])
        made = grouped_product(act, down_weights, ends)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(T * k, device=x.device))
        return made.index_select(0, place).view(T, k, -1).sum(1)


def by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Rows in the order of their experts, int64 [S], and where each expert's end, int32 [E].

    chosen: int64 [S] in 0..E-1. Stable, so that bits repeat.
    """
    # A GPU sorts a byte of the keys at a time.
    kind = torch.uint8 if experts <= 256 else torch.int16
    ids, order = torch.sort(chosen.to(kind), stable=True)
    every = torch.arange(experts, dtype=kind, device=chosen.device)
    return order, torch.searchsorted(ids, every, right=True, out_int32=True)


def is_mixture(module: nn.Module, model_type: str) -> bool:
    """Is it a block that `Mixture` computes, on a device that multiplies in groups?"""
    if model_type not in FAMILIES or children_of(module) != _PARTS:
        return False
    experts: Any = module.experts
    weights = dict(experts.named_parameters())
    return (
        weights.keys() == _WEIGHTS
        and is_silu(experts.act_fn)
        and multiplies_in_groups(weights["down_proj"].device)
    )
