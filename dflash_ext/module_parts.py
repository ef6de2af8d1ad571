"""What a module of transformers is made of, as far as our layers ask."""

from __future__ import annotations

from torch import nn


def children_of(module: nn.Module) -> set[str]:
    """Names of the modules in it."""
    return {name for name, _ in module.named_children()}


def is_silu(activation: nn.Module) -> bool:
    """Torch's own, or transformers' class of the same function."""
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"
