"""A decoder layer of a frozen target on our operators: norms, rotation, attention, activation.

The weights stay where they are: a `FusedLayer` reads those of the layer whose forward it replaces.
Residuals are added by the products that make their summand, in place, and every row-wise step is
one visit of memory. Shapes: T packed tokens, H hidden, Hq / Hkv heads, D head dim, I intermediate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dflash_ext.fp8 import Fp8Linear, is_plain
from dflash_ext.mixture import Mixture, is_mixture
from dflash_ext.module_parts import children_of, is_silu
from dflash_ext.ops.norm import rms_norm_forward
from dflash_ext.ops.quantise import Quantised, quantise_rows
from dflash_ext.ops.rotary import RopeTables, head_norm_rope_forward, head_rope_forward
from dflash_ext.ops.swiglu import swiglu_forward
from dflash_ext.packing import Packing, current_packing

# Model types whose layers compute what `FusedLayer` does. The names of a layer's parts do not say
# it: others have the same parts and scale residuals or leave out rotations.
FAMILIES = frozenset(["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss"])
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_NORMS = {"input_layernorm", "post_attention_layernorm"}
_SANDWICH_NORMS = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
_GATED_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class Norm:
    """RMSNorm of rows, with the weight as our operators take it."""

    def __init__(self, module: nn.Module) -> None:
        eps = getattr(module, "variance_epsilon", None)
        self.eps = float(module.eps if eps is None else eps)  # type: ignore[arg-type]
        weight: Any = module.weight
        # Some families store the weight less one: ask the module what it does to a row of ones.
        with torch.no_grad():
            ones = torch.ones(weight.shape, dtype=torch.float32, device=weight.device)
            self.weight = module(ones) * (1.0 + self.eps) ** 0.5

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm_forward(x, self.weight, self.eps)


class Product:
    """x W^T (+ bias) of a linear module that may compute it in a way of its own (quantised)."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.fp8 = isinstance(module, Fp8Linear)
        self._can_add = is_plain(module) and module.bias is None

    def __call__(self, x: Tensor | Quantised) -> Tensor:
        return self._module(x)

    def add_to(self, residual: Tensor, x: Tensor | Quantised) -> Tensor:
        """residual [T, O], which is overwritten, plus the product of x [T, I]."""
        if self._can_add and isinstance(x, Tensor):
            weight: Any = self._module.weight
            return residual.addmm_(x, weight.T)
        return residual.add_(self._module(x))


def together(x: Tensor, products: Sequence[Product]) -> list[Tensor]:
    """The products of the same rows, which are quantised once where all want that."""
    shared = quantise_rows(x) if all(product.fp8 for product in products) else x
    return [product(shared) for product in products]


class Attention:
    """Queries, keys and values of normed rows, normed by head or not, rotated, and attention."""

    def __init__(self, module: Any, window: int | None) -> None:
        self._qkv = [Product(getattr(module, name)) for name in ("q_proj", "k_proj", "v_proj")]
        self._head_dim: int = module.head_dim
        normed = children_of(module) >= _HEAD_NORMS
        self._q_norm, self._k_norm = (
            Norm(getattr(module, name)) if normed else None for name in ("q_norm", "k_norm")
        )
        self._options = {
            "window": window,
            "scale": module.scaling,
            "sinks": getattr(module, "sinks", None),
        }

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor], packing: Packing) -> Tensor:
        """[T, Hq * D] of x [T, H]."""
        D = self._head_dim
        q, k, v = (rows.unflatten(-1, (-1, D)) for rows in together(x, self._qkv))
        tables = packing.tables(angles, D)
        for heads, norm in ((q, self._q_norm), (k, self._k_norm)):
            _rotate(heads, norm, tables)
        return packing.attention(q, k, v, **self._options).flatten(1)


def _rotate(heads: Tensor, norm: Norm | None, tables: RopeTables) -> None:
    """In place."""
    if norm is None:
        head_rope_forward(heads, tables, out=heads)
    else:
        head_norm_rope_forward(heads, norm.weight, tables, norm.eps, out=heads)


class FeedForward:
    """What is added to the residual after attention: a gated product, a mixture of experts that we
    compute, or a module of its own."""

    def __init__(self, module: Any, model_type: str) -> None:
        self._module = module
        self._mixture = Mixture(module) if is_mixture(module, model_type) else None
        self._gated = children_of(module) == _GATED_PARTS
        if self._gated:
            self._gate_up = [Product(module.gate_proj), Product(module.up_proj)]
            self._down = Product(module.down_proj)
            self._act = None if is_silu(module.act_fn) else module.act_fn

    def _activation(self, x: Tensor) -> Tensor | Quantised:
        gate, up = together(x, self._gate_up)
        if self._act is not None:
            return self._act(gate).mul_(up)
        return quantise_rows(gate, up) if self._down.fp8 else swiglu_forward(gate, up, out=gate)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] of x [T, H]."""
        if self._gated:
            return self._down(self._activation(x))
        if self._mixture is not None:
            return self._mixture(x)
        made = self._module(x[None])  # a mixture of experts expects sequences, may return scores
        return (made[0] if isinstance(made, tuple) else made)[0]

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [T, H], which is overwritten, plus that of x [T, H]."""
        if self._gated:
            return self._down.add_to(residual, self._activation(x))
        return residual.add_(self(x))


class FusedLayer:
    """The forward of one decoder layer of a packed batch.

    Norms stand before attention and before the feed-forward part; with sandwich norms (Gemma 3)
    also behind each of them.
    """

    def __init__(self, layer: Any, model_type: str, window: int | None) -> None:
        """layer: one that `can_fuse` accepts; window: positions it sees, None for all."""
        self._sandwich = children_of(layer) >= _SANDWICH_NORMS
        self._attention_norm = Norm(layer.input_layernorm)
        self._attention = Attention(layer.self_attn, window)
        self._output = Product(layer.self_attn.o_proj)
        self._feed_forward = FeedForward(layer.mlp, model_type)
        if self._sandwich:
            self._behind_attention = Norm(layer.post_attention_layernorm)
            self._feed_forward_norm = Norm(layer.pre_feedforward_layernorm)
            self._behind_feed_forward = Norm(layer.post_feedforward_layernorm)
        else:
            self._feed_forward_norm = Norm(layer.post_attention_layernorm)

    def __call__(self, hidden: Tensor, angles: tuple[Tensor, Tensor], packing: Packing) -> Tensor:
        """The residual stream behind the layer, [1, T, H], in the memory of `hidden`, before it."""
        h = hidden[0]
        rows = self._attention(self._attention_norm(h), angles, packing)
        if self._sandwich:
            h.add_(self._behind_attention(self._output(rows)))
            h.add_(self._behind_feed_forward(self._feed_forward(self._feed_forward_norm(h))))
        else:
            self._output.add_to(h, rows)
            self._feed_forward.add_to(h, self._feed_forward_norm(h))
        return hidden


def can_fuse(layer: nn.Module, model_type: str) -> bool:
    """Is it a layer of a known family, made of the parts we know, and nobody else's already?"""
    if model_type not in FAMILIES or "forward" in vars(layer):
        return False
    if children_of(layer) - _SANDWICH_NORMS != _NORMS | {"self_attn", "mlp"}:  # or not loaded
        return False
    return children_of(layer.self_attn) - _HEAD_NORMS == _ATTENTION_PARTS  # type: ignore[arg-type]


def fuse(layer: Any, model_type: str, window: int | None) -> None:
    """Let packed forwards of `layer` run as a `FusedLayer`, and all others as before."""
    fused, before = FusedLayer(layer, model_type, window), layer.forward

    def forward(hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        packing = current_packing()
        if packing is None:
            return before(hidden_states, *args, **options)
        return fused(hidden_states, options["position_embeddings"], packing)

    layer.forward = forward


def unfuse(layer: Any) -> None:
    """Undo `fuse`."""
    del layer.forward
