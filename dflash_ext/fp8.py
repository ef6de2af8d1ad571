"""A frozen target's products in FP8, for drafters that will serve an FP8 target.

Of its decoder layers every linear module is replaced by an `Fp8Linear`: weights with a scale for
each output, activations with one for each token, quantised as they come. The experts of a mixture
that we compute become `Fp8Experts` alike; embedding, head, norms, routers and other experts stay as
they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dflash_ext.errors import UserError
from dflash_ext.ops.grouped import grouped_scaled_product, groups_run_on, mixed
from dflash_ext.ops.quantise import (
    ALIGNMENT,
    CAPABILITY,
    Quantised,
    quantise_rows,
    scaled_product,
)
from dflash_ext.torch_api import FP8

log = logging.getLogger(__name__)


class Fp8Linear(nn.Module):
    """x W^T (+ bias) of x [..., K] in bf16, or of rows that are quantised already."""

    def __init__(self, linear: nn.Linear) -> None:
        """Takes over the numbers of `linear`, not its memory. K and O are multiples of 16."""
        super().__init__()
        values, scales = quantise_rows(linear.weight.detach())
        self.values = nn.Parameter(values, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = linear.bias
        self.dtype = linear.weight.dtype

    @property
    def weight(self) -> Tensor:
        """[O, K] as the products see it, for whoever reads a target's weights."""
        return (self.values.float() * self.scales[:, None]).to(self.dtype)

    @torch.no_grad()
    def forward(self, x: Tensor | Quantised) -> Tensor:
        shape = () if isinstance(x, Quantised) else x.shape[:-1]
        rows = x if isinstance(x, Quantised) else quantise_rows(x.reshape(-1, x.shape[-1]))
        out = scaled_product(rows, Quantised(self.values, self.scales), self.dtype)
        if self.bias is not None:
            out += self.bias
        return out if isinstance(x, Quantised) else out.unflatten(0, shape)


class Fp8Experts(nn.Module):
    """The experts of a mixture in FP8, called as transformers calls its own, or by `Mixture`."""

    def __init__(self, experts: Any) -> None:
        """Takes over the numbers of `gate_up_proj` [E, 2 I, H] and `down_proj` [E, H, I].

        H and I are multiples of 16.
        """
        super().__init__()
        self.num_experts: int = experts.down_proj.shape[0]
        self.dtype = experts.down_proj.dtype
        for name in ("gate_up", "down"):
            weight = getattr(experts, f"{name}_proj").detach()
            values, scales = quantise_rows(weight.flatten(0, 1))
            frozen = nn.Parameter(values.view(weight.shape), requires_grad=False)
            self.register_parameter(f"{name}_values", frozen)
            self.register_parameter(f"{name}_scales", nn.Parameter(scales, requires_grad=False))

    @torch.no_grad()
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """[T, H] of x [T, H], each token's experts and their shares, [T, k]."""
        return mixed(chosen, weights, self.num_experts, partial(self.products, x))

    def products(self, x: Tensor, token: Tensor, ends: Tensor, share: Tensor) -> Tensor:
        """What `ops.grouped.mixed` asks for, of x [T, H], quantised before it is copied."""
        values, scales = quantise_rows(x)
        # Torch copies rows of bytes, not of FP8.
        taken = values.view(torch.uint8).index_select(0, token).view(FP8)
        rows = Quantised(taken, scales.index_select(0, token))
        gate, up = self._product(rows, "gate_up", ends).chunk(2, dim=1)
        act = quantise_rows(gate, up)
        act.scales.mul_(share)
        return self._product(act, "down", ends)

    def _product(self, rows: Quantised, name: str, ends: Tensor) -> Tensor:
        values, scales = (getattr(self, f"{name}_{part}") for part in ("values", "scales"))
        weights = Quantised(values, scales.view(values.shape[:2]))
        return grouped_scaled_product(rows, weights, ends, self.dtype)


def is_plain(module: nn.Module) -> bool:
    """Is its forward torch's own x W^T (+ bias), and nobody else's?"""
    return type(module).forward is nn.Linear.forward and "forward" not in vars(module)


def quantise_layers(
    layers: Iterable[nn.Module], is_mixture: Callable[[nn.Module], bool] = lambda _: False
) -> int:
    """Replace the products of decoder layers in place, one after the other; returns how many.

    Linear modules, and the experts of what `is_mixture`. One whose sizes are no multiples of 16, or
    of which the device has no FP8 products, stays.
    """
    count = 0
    for layer in layers:
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear) and is_plain(child) and _fits(child.weight):
                    setattr(parent, name, Fp8Linear(child))
                elif name == "experts" and is_mixture(parent) and _experts_fit(child):
                    setattr(parent, name, Fp8Experts(child))
                else:
                    continue
                count += 1
    return count


def weights_of(layer: nn.Module) -> dict[str, Tensor]:
    """The parameters of a decoder layer by name; of a product in FP8 its `weight`."""
    found: dict[str, Tensor] = dict(layer.named_parameters())
    for name, module in layer.named_modules():
        if isinstance(module, Fp8Linear):
            del found[f"{name}.values"], found[f"{name}.scales"]
            found[f"{name}.weight"] = module.weight
    return found


def fits_fp8(device: torch.device) -> bool:
    """Do products of FP8 rows run there?"""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= CAPABILITY


def check_device(device: torch.device, option: str = "--target.fp8") -> None:
    """UserError unless products of FP8 rows run there (on the CPU they are only emulated)."""
    if not fits_fp8(device):
        raise UserError(
            f"{option}: {torch.cuda.get_device_name(device)} has no FP8 products with a scale "
            "for each row; expected compute capability 9.0 or newer: leave the option out"
        )


def _fits(weight: Tensor) -> bool:
    return all(size % ALIGNMENT == 0 for size in weight.shape[-2:])


def _experts_fit(experts: Any) -> bool:
    down = experts.down_proj
    return _fits(down) and groups_run_on(down.device, FP8)
