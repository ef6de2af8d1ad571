"""A frozen target's products in FP8, for drafters that will serve an FP8 target.

Of its decoder layers every linear module is replaced by an `Fp8Linear`: weights with a scale for
each output, activations with one for each token, quantised as they come. Embedding, head, norms,
routers and experts held as one tensor stay as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dflash_ext.errors import UserError
from dflash_ext.ops.quantise import ALIGNMENT, CAPABILITY, Quantised, quantise_rows, scaled_product

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


def is_plain(module: nn.Module) -> bool:
    """Is its forward torch's own x W^T (+ bias), and nobody else's?"""
    return type(module).forward is nn.Linear.forward and "forward" not in vars(module)


def quantise_layers(layers: Iterable[nn.Module]) -> int:
    """Replace the linear modules of decoder layers in place, one after the other; returns how many.

    A module whose sizes are no multiples of 16 stays. UserError on a device without FP8 products.
    """
    count = 0
    for layer in layers:
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear) and is_plain(child) and _fits(child):
                    setattr(parent, name, Fp8Linear(child))
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


def check_device(device: torch.device) -> None:
    """UserError unless products of FP8 rows run there (on the CPU they are only emulated)."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        raise UserError(
            f"--target.fp8: {torch.cuda.get_device_name(device)} has no FP8 products with a scale "
            "for each row; expected compute capability 9.0 or newer: leave the option out"
        )


def _fits(linear: nn.Linear) -> bool:
    return all(size % ALIGNMENT == 0 for size in linear.weight.shape)
