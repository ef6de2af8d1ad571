"""An independent drafter: plain torch, dense masks, nothing imported from dflash_ext.

Written from semantics.md alone, row by row where that is clearer; the truth that drafter.py and
export.py are held against. `config` is the exported config.json as a dict, `state` its tensors.
"""

from __future__ import annotations

import math

import torch


def _rms(x, weight, eps):
    x = x.to(torch.float64) if x.dtype == torch.float64 else x.float()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def _rotate(x, positions, theta):
    """Half rotation of x [rows, heads, D]."""
    D = x.shape[-1]
    inv_freq = torch.tensor([theta ** (-2 * i / D) for i in range(D // 2)], dtype=x.dtype)
    angle = torch.outer(positions.to(x.dtype), inv_freq)
    cos = torch.cat([angle, angle], -1).cos()[:, None]
    sin = torch.cat([angle, angle], -1).sin()[:, None]
    swapped = torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1)
    return x * cos + swapped * sin


def block_visibility(config, layer_type, doc_of_ctx, pos_of_ctx, block_doc, block_anchor, B):
    """bool [N*B, T + N*B] from documents and in-document positions, one pair at a time."""
    N, T = len(block_doc), len(doc_of_ctx)
    sliding = layer_type == "sliding_attention"
    override = config.get("is_causal")
    causal = sliding if override is None else override
    mask = torch.zeros(N * B, T + N * B, dtype=torch.bool)
    for i in range(N):
        for k in range(B):
            reach = config["sliding_window"] - 1 if sliding else math.inf
            mask[i * B + k, :T] = torch.tensor(
                [
                    doc == block_doc[i] and pos < block_anchor[i] <= pos + reach - k
                    for doc, pos in zip(doc_of_ctx, pos_of_ctx)
                ],
                dtype=torch.bool,
            )
            for m in range(B):
                mask[i * B + k, T + i * B + m] = m <= k or not causal
    return mask


def reference_hidden(
    state, config, features, doc_of_ctx, pos_of_ctx, block_embeds, block_doc, block_anchor
):
    """Hidden rows [N*B, H] after the final norm, in the dtype of `features` (fp32 or fp64).

    features [T, K*Ht]; doc_of_ctx, pos_of_ctx: T ints; block_embeds [N*B, H]; block_doc,
    block_anchor: N ints (document, in-document position).
    """
    dtype = features.dtype
    w = {name: tensor.to(dtype) for name, tensor in state.items()}
    eps, D = config["rms_norm_eps"], config["head_dim"]
    Hq, Hkv = config["num_attention_heads"], config["num_key_value_heads"]
    B, N, T = config["block_size"], len(block_doc), features.shape[0]
    ctx_pos = torch.tensor(pos_of_ctx, dtype=torch.int64)
    blk_pos = torch.tensor([a + k for a in block_anchor for k in range(B)], dtype=torch.int64)

    c = _rms(features @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    h = block_embeds.to(dtype)
    for layer, layer_type in enumerate(config["layer_types"]):
        p = f"layers.{layer}."

        def linear(x, name, p=p):
            out = x @ w[p + name + ".weight"].T
            return out + w[p + name + ".bias"] if p + name + ".bias" in w else out

        n = _rms(h, w[p + "input_layernorm.weight"], eps)
        both = torch.cat([c, n])
        q = linear(n, "self_attn.q_proj").view(-1, Hq, D)
        k = linear(both, "self_attn.k_proj").view(-1, Hkv, D)
        v = linear(both, "self_attn.v_proj").view(-1, Hkv, D)
        q = _rms(q, w[p + "self_attn.q_norm.weight"], eps)
        k = _rms(k, w[p + "self_attn.k_norm.weight"], eps)
        q = _rotate(q, blk_pos, config["rope_theta"])
        k = _rotate(k, torch.cat([ctx_pos, blk_pos]), config["rope_theta"])
        k = k.repeat_interleave(Hq // Hkv, 1)
        v = v.repeat_interleave(Hq // Hkv, 1)
        mask = block_visibility(
            config, layer_type, doc_of_ctx, pos_of_ctx, block_doc, block_anchor, B
        )
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(D)
        prob = scores.masked_fill(~mask, -math.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", prob, v).reshape(N * B, Hq * D)
        h = h + linear(attended, "self_attn.o_proj")
        n = _rms(h, w[p + "post_attention_layernorm.weight"], eps)
        gate, up = linear(n, "mlp.gate_proj"), linear(n, "mlp.up_proj")
        h = h + linear(gate * torch.sigmoid(gate) * up, "mlp.down_proj")
    assert len(doc_of_ctx) == T
    return _rms(h, w["norm.weight"], eps)
