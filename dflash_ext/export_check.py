"""An independent reading of an exported drafter: plain torch, straight from the stored files.

It shares nothing with drafter.py or the operators, so that an export which both of them would
misread the same way is still caught. One document, block by block, as at inference.
Shapes: T context rows, N blocks, B slots, H hidden, Hq / Hkv heads, D head dim, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_ext.stored import StoredTensors


def decoder_config(content: dict[str, Any]) -> dict[str, Any]:
    """What the forward below needs, from a config.json of either layout."""
    inner = content.get("transformer_layer_config")
    decoder = dict(content if inner is None else inner)
    decoder.setdefault("rope_theta", (decoder.get("rope_parameters") or {}).get("rope_theta"))
    decoder.setdefault("is_causal", (content.get("dflash_config") or {}).get("causal"))
    if inner is not None and decoder["is_causal"] is None and content["sliding_window_non_causal"]:
        decoder["is_causal"] = False  # their full layers are not causal anyway
    return decoder


class StoredDrafter:
    """The drafter that `config.json` and the safetensors of a directory describe."""

    def __init__(self, directory: str | Path) -> None:
        folder = Path(directory)
        self.config = decoder_config(json.loads((folder / "config.json").read_text()))
        """The decoder's part of config.json, `rope_theta` and `is_causal` resolved."""
        self._tensors = StoredTensors(folder)
        self.names = self._tensors.names

    def stored(self, name: str) -> Tensor:
        """A tensor exactly as stored."""
        return self._tensors.get(name)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.stored(f"{name}.weight").to(x.dtype).T
        return y + self.stored(f"{name}.bias").to(x.dtype) if f"{name}.bias" in self.names else y

    def _norm(self, x: Tensor, name: str) -> Tensor:
        rms = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        return x / rms * self.stored(f"{name}.weight").to(x.dtype)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate the two halves of every head of x [..., heads, D] by position; angles in fp64."""
        half = x.shape[-1] // 2
        exponent = -torch.arange(half, dtype=torch.float64) / half
        angle = positions.double()[..., None, None] * self.config["rope_theta"] ** exponent
        turned = torch.polar(torch.ones_like(angle), angle) * torch.complex(
            x[..., :half].double(), x[..., half:].double()
        )
        return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)

    def _sees(self, layer_type: str, anchor: int, block_size: int) -> Tensor:
        """bool [B, anchor + B]: which context rows and slots each slot of a block sees."""
        slot = torch.arange(block_size)[:, None]
        context = torch.ones(block_size, anchor, dtype=torch.bool)
        own = torch.ones(block_size, block_size, dtype=torch.bool)
        sliding = layer_type == "sliding_attention"
        if sliding:
            reach = self.config["sliding_window"] - 1
            context = anchor + slot - torch.arange(anchor) <= reach
        override = self.config.get("is_causal")
        if sliding if override is None else override:
            own = own.tril()
        return torch.cat([context, own], dim=1)

    @torch.no_grad()
    def hidden(
        self,
        features: Tensor,
        anchors: Sequence[int],
        block_embeds: Tensor,
        first_position: int = 0,
    ) -> Tensor:
        """Final hidden rows [N, B, H]; times the target's lm_head they are the logits.

        features [T, K*Ht] of one document whose first row stands at `first_position`; block i is
        anchored at row anchors[i] <= T and sees rows before it; block_embeds [N, B, H] is the
        target's embedding of the block tokens. Computes in the dtype of its inputs.
        """
        (T, _), B, D = features.shape, block_embeds.shape[1], self.config["head_dim"]
        place = torch.arange(T) + first_position
        block_place = torch.tensor(anchors)[:, None] + torch.arange(B) + first_position
        context = self._norm(self._linear(features, "fc"), "hidden_norm")
        h = block_embeds
        for i, layer_type in enumerate(self.config["layer_types"]):
            layer, attn = f"layers.{i}", f"layers.{i}.self_attn"

            def key(x: Tensor, at: Tensor, attn: str = attn) -> Tensor:
                heads = self._linear(x, f"{attn}.k_proj").unflatten(-1, (-1, D))
                return self._rotate(self._norm(heads, f"{attn}.k_norm"), at)

            def value(x: Tensor, attn: str = attn) -> Tensor:
                return self._linear(x, f"{attn}.v_proj").unflatten(-1, (-1, D))

            x = self._norm(h, f"{layer}.input_layernorm")
            query = self._linear(x, f"{attn}.q_proj").unflatten(-1, (-1, D))
            query = self._rotate(self._norm(query, f"{attn}.q_norm"), block_place)
            context_kv = key(context, place), value(context)
            block_kv = key(x, block_place), value(x)
            mixed = []
            for n, anchor in enumerate(anchors):
                keys, values = (torch.cat([c[:anchor], b[n]]) for c, b in zip(context_kv, block_kv))
                sees = self._sees(layer_type, anchor, B)
                mixed.append(_attend(query[n], keys, values, sees).flatten(1))
            h = h + self._linear(torch.stack(mixed), f"{attn}.o_proj")
            x = self._norm(h, f"{layer}.post_attention_layernorm")
            gate = self._linear(x, f"{layer}.mlp.gate_proj")
            up = self._linear(x, f"{layer}.mlp.up_proj")
            h = h + self._linear(gate * gate.sigmoid() * up, f"{layer}.mlp.down_proj")
        return self._norm(h, "norm")


def _attend(query: Tensor, keys: Tensor, values: Tensor, sees: Tensor) -> Tensor:
    """Softmax attention of query [B, Hq, D] over keys, values [S, Hkv, D] where sees [B, S]."""
    group = query.shape[1] // keys.shape[1]
    heads = []
    for head in range(query.shape[1]):
        k, v = keys[:, head // group], values[:, head // group]
        score = query[:, head] @ k.T / math.sqrt(query.shape[-1])
        heads.append(score.masked_fill(~sees, -math.inf).softmax(-1) @ v)
    return torch.stack(heads, dim=1)
