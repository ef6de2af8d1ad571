"""The drafter: a Qwen3-style block decoder over the target's features (semantics.md, "Drafter").

Parameters are the fp32 masters, under the checkpoint's own names. A forward computes in the dtype
of its inputs and casts the weights on the way, so optimizer state and resume are plain fp32
torch and never meet bf16 (requirement 10).
Shapes: T context rows, N blocks, B slots, K taps, Ht target hidden, H hidden, Hq / Hkv heads,
D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from dflash_ext.drafter_rules import FULL, SLIDING, broken_rules
from dflash_ext.errors import UserError
from dflash_ext.layers import (
    Linear,
    RMSNorm,
    linear_add,
    linears,
    norm_linears,
    swiglu_linear_add,
)
from dflash_ext.ops import AttentionLayout, build_layout, dflash_attention
from dflash_ext.ops.rotary import RopeTables, head_norm_rope, rope_tables
from dflash_ext.shield import shield


@dataclass(frozen=True)
class DrafterConfig:
    """Shape of a drafter; validated on construction (UserError says expected and got)."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    layer_types: tuple[str, ...]
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    """Tapped decoder layers of the target; id i is the OUTPUT of layer i, before any final norm."""
    num_target_layers: int | None
    """None: a drafter of others that does not say."""
    target_hidden_size: int
    sliding_window: int | None = None
    attention_bias: bool = False
    is_causal: bool | None = None
    """Override of in-block causality for every layer; None: sliding causal, full not."""

    def __post_init__(self) -> None:
        if wrong := broken_rules(vars(self)):
            raise UserError("; ".join(wrong))

    @property
    def feature_width(self) -> int:
        """K * Ht, columns of a feature batch."""
        return len(self.target_layer_ids) * self.target_hidden_size

    @property
    def context_window(self) -> int | None:
        """The window of the layer that sees most; None if one sees the whole context."""
        return None if FULL in self.layer_types else self.sliding_window

    def causal(self, layer_type: str) -> bool:
        """Whether slot k of a block sees only slots m <= k in layers of this type."""
        return layer_type == SLIDING if self.is_causal is None else self.is_causal


class Attention(nn.Module):
    """Queries from block rows; keys and values from context and block rows, same projections."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        H, D, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = D
        self.q_proj = Linear(H, config.num_heads * D, bias=bias)
        self.k_proj = Linear(H, config.num_kv_heads * D, bias=bias)
        self.v_proj = Linear(H, config.num_kv_heads * D, bias=bias)
        self.o_proj = Linear(config.num_heads * D, H, bias=bias)
        self.q_norm = RMSNorm(D, config.rms_norm_eps)
        self.k_norm = RMSNorm(D, config.rms_norm_eps)

    def keys_values(self, key: Tensor, value: Tensor, rope: RopeTables) -> KeysValues:
        """K (normed per head, rotated) and V (neither) of projected rows [rows, Hkv * D]."""
        return _rotated(self._heads(key), self.k_norm, rope), self._heads(value)

    def forward(
        self, projected: Projected, rope: RopeTables, context: KeysValues, layout: AttentionLayout
    ) -> Tensor:
        """[N*B, Hq * D], before o_proj, of the blocks' projected queries, keys and values."""
        query = _rotated(self._heads(projected.query), self.q_norm, rope)
        own = self.keys_values(projected.key, projected.value, rope)
        # The CUDA kernels are bf16 only: an fp32 evaluation rounds here and nowhere else.
        dtype = torch.bfloat16 if query.is_cuda else query.dtype
        q, k_ctx, v_ctx, k_blk, v_blk = (x.to(dtype) for x in (query, *context, *own))
        out = dflash_attention(q, k_ctx, v_ctx, k_blk, v_blk, layout)
        return out.flatten(1).to(query.dtype)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, self.head_dim))


def _rotated(heads: Tensor, norm: RMSNorm, rope: RopeTables) -> Tensor:
    return head_norm_rope(heads, norm.weight, rope, norm.eps)


KeysValues = tuple[Tensor, Tensor]
"""K and V, each [rows, Hkv, D]."""


class Projected(NamedTuple):
    """What a layer makes of its input rows before any row meets another."""

    h: Tensor
    """[rows, H]: the input itself, the residual stream."""
    query: Tensor
    key: Tensor
    value: Tensor

    def spread(self, block_size: int) -> Projected:
        """[N*B, ...] of [N+1, ...]: row i is slot 0 of block i, the last row every other slot."""
        return Projected(*(_spread(x, block_size) for x in self))


def _spread(x: Tensor, block_size: int) -> Tensor:
    anchors, mask = x[:-1, None], x[-1:, None]
    return torch.cat([anchors, mask.expand(len(anchors), block_size - 1, -1)], 1).flatten(0, 1)


class MLP(nn.Module):
    """The weights of a SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)


class Layer(nn.Module):
    """h + Attn(norm(h)), then h + SwiGLU(norm(h)); the first norm and its products apart."""

    def __init__(self, config: DrafterConfig, layer_type: str) -> None:
        super().__init__()
        self.layer_type = layer_type
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def project(self, h: Tensor) -> Projected:
        own = self.self_attn
        products = [own.q_proj, own.k_proj, own.v_proj]
        return Projected(*norm_linears(h, self.input_layernorm, products))

    def forward(
        self,
        projected: Projected,
        rope: RopeTables,
        context: KeysValues,
        layout: AttentionLayout,
        rows: Tensor | None = None,
    ) -> Tensor:
        """The residual stream behind the layer, [N*B, H]; of `rows` (int64 [R]) alone, [R, H]."""
        h, mixed = projected.h, self.self_attn(projected, rope, context, layout)
        if rows is not None:
            h, mixed = h.index_select(0, rows), mixed.index_select(0, rows)
        h = linear_add(mixed, self.self_attn.o_proj, h)
        mlp = self.mlp
        h, gate, up = norm_linears(h, self.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj])
        return swiglu_linear_add(gate, up, mlp.down_proj, h)


class Drafter(nn.Module):
    """Parameter names are exactly the exported checkpoint's (semantics.md, "Checkpoint")."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(config.feature_width, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        for module in self.modules():
            if isinstance(module, Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        shield(self)

    def encode_context(self, features: Tensor) -> Tensor:
        """c [T, H] of features [T, K*Ht]: computed once, feeds every layer."""
        width = self.config.feature_width
        if features.dim() != 2 or features.shape[1] != width:
            taps, hidden = len(self.config.target_layer_ids), self.config.target_hidden_size
            raise UserError(
                f"expected features of {taps} taps x {hidden} = {width} columns, "
                f"got {tuple(features.shape)}"
            )
        return self.hidden_norm(self.fc(features))

    def layouts(
        self, ctx_start: Tensor, ctx_end: Tensor, num_ctx: int, visible_rows: int | None = None
    ) -> dict[str, AttentionLayout]:
        """Attention layout of each layer type present, for blocks over `num_ctx` context rows.

        visible_rows: as for `build_layout`.
        """
        return {
            kind: build_layout(
                ctx_start,
                ctx_end,
                num_ctx=num_ctx,
                block_size=self.config.block_size,
                window=self.config.sliding_window if kind == SLIDING else None,
                causal=self.config.causal(kind),
                visible_rows=visible_rows,
            )
            for kind in sorted(set(self.config.layer_types))
        }

    def stack(self) -> list[Layer]:
        """The decoder layers, typed."""
        return cast("list[Layer]", list(self.layers))

    def _rope(self, positions: Tensor) -> RopeTables:
        return rope_tables(positions, self.config.head_dim, self.config.rope_theta)

    def context_keys_values(self, context: Tensor, positions: Tensor) -> list[KeysValues]:
        """K and V of each layer, of context rows [T, H] at int64 positions [T]."""
        attentions = [layer.self_attn for layer in self.stack()]
        # The context bypasses input_layernorm: hidden_norm has already scaled it.
        made = linears(context, [p for a in attentions for p in (a.k_proj, a.v_proj)])
        rope = self._rope(positions)
        pairs = zip(attentions, made[::2], made[1::2])
        return [attention.keys_values(key, value, rope) for attention, key, value in pairs]

    def forward(
        self,
        embeds: Tensor,
        context: Tensor,
        block_positions: Tensor,
        context_positions: Tensor,
        layouts: Mapping[str, AttentionLayout],
        rows: Tensor | None = None,
    ) -> Tensor:
        """Hidden rows [N*B, H] after the final norm, ready for the target's lm_head.

        embeds [N+1, H]: the target's embedding of each anchor's token, and of the mask token;
        context [T, H] from `encode_context`, same dtype; positions int64 [N*B] and [T], inside the
        document; layouts from `layouts`. rows (int64 [R]): only these of the N*B, [R, H].
        """
        contexts = self.context_keys_values(context, context_positions)
        return self.blocks(embeds, contexts, block_positions, layouts, rows)

    def blocks(
        self,
        embeds: Tensor,
        contexts: Sequence[KeysValues],
        block_positions: Tensor,
        layouts: Mapping[str, AttentionLayout],
        rows: Tensor | None = None,
    ) -> Tensor:
        """`forward` given `context_keys_values` of every layer."""
        layers, rope = self.stack(), self._rope(block_positions)
        # All mask slots come into the first layer alike: one row is projected for all of them.
        projected = layers[0].project(embeds).spread(self.config.block_size)
        for layer, pair, following in zip(layers, contexts, [*layers[1:], None]):
            layout = layouts[layer.layer_type]
            if following is None:  # behind the last attention no row meets another
                h = layer(projected, rope, pair, layout, rows)
            else:
                projected = following.project(layer(projected, rope, pair, layout))
        return self.norm(h)
