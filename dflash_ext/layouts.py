"""The two layouts of `config.json` that serving engines read, written from a `DrafterConfig`.

`zlab`: the decoder's fields at the top level, tap ids as in semantics.md (id i: the output of layer
i). `speculators` (schema of version 0.9, `DFlashSpeculatorConfig`): the decoder's fields in
`transformer_layer_config`, tap ids + 1 (id 0 is the embedding's output), and a description of the
proposal and of the target ("verifier"). The tensors and their names are the same in both.
`layout_reader.py` is the way back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dflash_ext.drafter import DrafterConfig
from dflash_ext.drafter_rules import FULL, SLIDING
from dflash_ext.errors import UserError

Layout = Literal["zlab", "speculators"]
SPECULATORS_VERSION = "0.9.0"
"""Whose schema `speculators_json` follows."""

# DrafterConfig field -> key of config.json, where they are one to one.
DECODER_KEYS = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
    "attention_bias": "attention_bias",
}
# How the weights were trained; engines ignore it, our reader does not.
TRAINED_AS = {"final_tap_normed": False, "label_shift": 0}


@dataclass(frozen=True)
class TargetLabel:
    """What the layouts tell of the target beside the drafter's shape."""

    name: str | None = None
    """Directory or hub id; only the speculators layout has it."""
    architectures: tuple[str, ...] = ()
    bos_token_id: Any = None
    eos_token_id: Any = None
    """Ids, lists of ids or None, as the target's config has them."""


def layout_of(content: dict[str, Any]) -> Layout:
    """Which layout a config.json has."""
    return "speculators" if "speculators_model_type" in content else "zlab"


def to_layout(config: DrafterConfig, layout: Layout, target: TargetLabel) -> dict[str, Any]:
    """The content of config.json. UserError if the layout cannot say what the drafter is."""
    if layout == "speculators":
        return speculators_json(config, target)
    return zlab_json(config, target)


def _decoder(config: DrafterConfig, target: TargetLabel) -> dict[str, Any]:
    """The Qwen3 decoder's fields; bos and eos ids are the target's."""
    sliding = SLIDING in config.layer_types
    content: dict[str, Any] = {
        "model_type": "qwen3",
        "dtype": "bfloat16",
        **{key: getattr(config, field) for field, key in DECODER_KEYS.items()},
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_scaling": None,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window if sliding else None,
        "use_sliding_window": sliding,
        "tie_word_embeddings": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_id,
    }
    if config.is_causal is not None:  # a global override in serving engines: only when meant
        content["is_causal"] = config.is_causal
    return content


def zlab_json(config: DrafterConfig, target: TargetLabel) -> dict[str, Any]:
    """The layout of published z-lab drafters."""
    if config.num_target_layers is None:
        raise UserError(
            "the z-lab layout says how many layers the target has, this drafter does not: give the "
            "target"
        )
    return {
        "architectures": ["DFlashDraftModel"],
        **_decoder(config, target),
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            "block_size": config.block_size,
        },
        **TRAINED_AS,
    }


def speculators_json(config: DrafterConfig, target: TargetLabel) -> dict[str, Any]:
    """The layout of the `speculators` library, which vLLM also reads.

    `sliding_window_non_causal` is their word for sliding layers without in-block causality; their
    full layers never have it. Where no layer slides it says nothing to their model, but releases
    of vLLM make a global override of causality from it, so it is true there.
    """
    if target.name is None:
        raise UserError("the speculators layout names its target (verifier): give the target")
    if config.is_causal and FULL in config.layer_types:
        raise UserError(
            "the speculators layout has no in-block causality for full-attention layers "
            "(is_causal true): use the z-lab layout"
        )
    return {
        "architectures": ["DFlashDraftModel"],
        "dtype": "bfloat16",
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.block_size - 1,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": target.name,
                "architectures": list(target.architectures),
            },
        },
        "transformer_layer_config": _decoder(config, target),
        "draft_vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "target_hidden_size": config.target_hidden_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": not (SLIDING in config.layer_types and config.causal(SLIDING)),
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "num_target_layers": config.num_target_layers,
        **TRAINED_AS,
    }
