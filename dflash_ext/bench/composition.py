"""The drafter's step as one would first write it in torch: what `bench step` is measured against.

nn modules with bf16 weights, keys and values of context and blocks concatenated, compiled
flex_attention (CPU: SDPA with the dense mask), logits of all supervised rows at once. Nothing here
is used by training. Shapes as in drafter.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_ext.bench.anchors import flex_visible
from dflash_ext.drafter import SLIDING, DrafterConfig
from dflash_ext.ops.attention import visible_pairs
from dflash_ext.ops.layout import AttentionLayout
from dflash_ext.trainer import Inputs

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of q [1, Hq, N*B, D] over k, v [1, Hkv, T + N*B, D]."""


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half rotation of x [rows, heads, D]; cos, sin [rows, 1, D]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


class _Attention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        H, D, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.D = D
        self.q_proj = nn.Linear(H, config.num_heads * D, bias=bias)
        self.k_proj = nn.Linear(H, config.num_kv_heads * D, bias=bias)
        self.v_proj = nn.Linear(H, config.num_kv_heads * D, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * D, H, bias=bias)
        self.q_norm, self.k_norm = (_Norm(D, config.rms_norm_eps) for _ in range(2))

    def forward(self, x: Tensor, context: Tensor, rope: Any, rope_all: Any, mix: Mix) -> Tensor:
        rows = torch.cat([context, x])
        q = _rotate(self.q_norm(self.q_proj(x).unflatten(1, (-1, self.D))), *rope)
        k = _rotate(self.k_norm(self.k_proj(rows).unflatten(1, (-1, self.D))), *rope_all)
        v = self.v_proj(rows).unflatten(1, (-1, self.D))
        out = mix(*(y.transpose(0, 1)[None] for y in (q, k, v)))
        return self.o_proj(out[0].transpose(0, 1).flatten(1))


class _Mlp(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        H, inner = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = (nn.Linear(H, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = _Mlp(config)


class Composition(nn.Module):
    """Same parameters under the same names as `Drafter`."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_width, config.hidden_size, bias=False)
        self.hidden_norm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in config.layer_types)
        self.norm = _Norm(config.hidden_size, config.rms_norm_eps)

    def _rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        half = torch.arange(0, self.config.head_dim, 2, device=positions.device).float()
        inverse = self.config.rope_theta ** -(half / self.config.head_dim)
        angle = (positions.float()[:, None] * inverse).repeat(1, 2)[:, None]
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def forward(self, inputs: Inputs, embeds: Tensor, mixes: dict[str, Mix]) -> Tensor:
        """Hidden rows [N*B, H] of embeddings [N*B, H]; `mixes` by layer type."""
        context = self.hidden_norm(self.fc(inputs.features))
        own = inputs.blocks.positions
        rope = self._rope(own, context.dtype)
        rope_all = self._rope(torch.cat([inputs.positions, own]), context.dtype)
        h = embeds
        for layer, kind in zip(cast("list[Any]", list(self.layers)), self.config.layer_types):
            x = layer.input_layernorm(h)
            h = h + layer.self_attn(x, context, rope, rope_all, mixes[kind])
            h = h + layer.mlp(layer.post_attention_layernorm(h))
        return self.norm(h)


def numerator(
    composition: Composition, inputs: Inputs, embeds: Tensor, head: Tensor, mixes: dict[str, Mix]
) -> Tensor:
    """fp32 scalar: sum of weight * cross-entropy, through the logits of all supervised rows."""
    blocks = inputs.blocks
    hidden = composition(inputs, embeds, mixes)[blocks.rows]
    labels, weights = (x.flatten()[blocks.rows] for x in (blocks.labels, blocks.weights))
    return (F.cross_entropy((hidden @ head.T).float(), labels, reduction="none") * weights).sum()


def slot_embeddings(inputs: Inputs, embedding: Tensor) -> Tensor:
    """[N*B, H]: the embedding of every slot's token."""
    blocks = inputs.blocks
    ids = blocks.input_ids[-1:].expand(blocks.num_blocks, blocks.block_size).clone()
    ids[:, 0] = blocks.input_ids[:-1]
    return F.embedding(ids.flatten(), embedding)


def mixes(layouts: dict[str, AttentionLayout], rows: int, *, compiled: bool) -> dict[str, Mix]:
    """Attention of each layer type over `rows` = N*B queries: compiled flex_attention (CUDA), or
    SDPA with the dense mask."""
    return {
        kind: _flex(layout, rows, kind) if compiled else _dense(layout)
        for kind, layout in layouts.items()
    }


def _dense(layout: AttentionLayout) -> Mix:
    mask = visible_pairs(layout)

    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    return mix


def _flex(layout: AttentionLayout, rows: int, kind: str) -> Mix:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    flex = torch.compile(flex_attention, dynamic=False)
    visible, B, T = flex_visible(layout), layout.block_size, layout.num_ctx
    if kind == SLIDING:
        plain, window, end = visible, layout.window_or_none, layout.ctx_end.long()

        def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            inside = torch.where(
                kv < T,
                end[q // B] + q % B - kv <= window - 1,
                (kv - T) % B <= q % B if layout.causal else kv >= T,
            )
            return plain(b, h, q, kv) & inside

    mask = create_block_mask(visible, None, None, rows, T + rows, device="cuda")

    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex(q, k, v, block_mask=mask, enable_gqa=True)

    return mix
