"""Where a drafter comes from: its shape from the target, its first weights from the options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash_ext.config import DrafterOptions, TargetOptions, is_export
from dflash_ext.drafter import Drafter, DrafterConfig
from dflash_ext.drafter_rules import FULL, SLIDING
from dflash_ext.errors import UserError
from dflash_ext.export import check_own_vocabulary, check_pairing, load_export, read_export
from dflash_ext.fp8 import weights_of
from dflash_ext.target import Target
from dflash_ext.target_loading import decoder_layers
from dflash_ext.transformers_api import rope_theta

DEFAULT_LAYERS, DEFAULT_BLOCK_SIZE, DEFAULT_WINDOW = 2, 8, 2048


def drafter_config(
    options: DrafterOptions, target: Target, mask_token_id: int | None = None
) -> DrafterConfig:
    """The drafter's shape: the options, and the target's own values where they are None.

    RoPE is always the plain one over the whole head, whatever the target uses.
    """
    text = target.model.config.get_text_config()

    def own(name: str, *names: str) -> Any:
        """The option `name`, where there is one and it is set; else the config's first of names."""
        option = getattr(options, name, None)
        found = [getattr(text, n) for n in names if getattr(text, n, None) is not None]
        if option is None and not found:
            remedy = (
                f"set --drafter.{name.replace('_', '-')}"
                if hasattr(options, name)
                else "such a target is not supported"
            )
            raise UserError(f"the target's config has no {names[0]}: {remedy}")
        return found[0] if option is None else option

    layer_types, window = _layer_types(options)
    heads = own("num_heads", "num_attention_heads")
    default_head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return DrafterConfig(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        num_layers=len(layer_types),
        num_heads=heads,
        num_kv_heads=own("num_kv_heads", "num_key_value_heads", "num_attention_heads"),
        head_dim=options.head_dim or default_head_dim,
        intermediate_size=own("intermediate_size", "intermediate_size"),
        vocab_size=target.vocabulary().embedding.shape[0],
        rms_norm_eps=own("rms_norm_eps", "rms_norm_eps"),
        rope_theta=float(options.rope_theta or _rope_theta(text)),
        max_position_embeddings=own("max_position_embeddings", "max_position_embeddings"),
        layer_types=layer_types,
        sliding_window=window,
        is_causal=options.is_causal,
        block_size=options.block_size or DEFAULT_BLOCK_SIZE,
        mask_token_id=target.mask_token_id(mask_token_id),
        target_layer_ids=target.tap_ids,
        num_target_layers=target.num_layers,
    )


def _layer_types(options: DrafterOptions) -> tuple[tuple[str, ...], int | None]:
    """(type of each layer, window or None) of the options; the last layer is a full one if open."""
    window, kinds = options.sliding_window, options.layer_types
    num_layers = options.num_layers or (len(kinds) if kinds else DEFAULT_LAYERS)
    if kinds is None:
        sliding = num_layers - 1 if window else 0
        kinds = (SLIDING,) * sliding + (FULL,) * (num_layers - sliding)
    if len(kinds) != num_layers:
        raise UserError(
            f"layer_types has {len(kinds)} layers, num_layers is {num_layers}: add "
            f"--drafter.num-layers {len(kinds)}"
        )
    if SLIDING in kinds:
        return kinds, window or DEFAULT_WINDOW
    if window is not None:
        raise UserError(
            f"sliding_window {window}: no layer would slide ({num_layers} full); give more layers "
            "or --drafter.layer-types sliding"
        )
    return kinds, None


def drafter_layers(options: DrafterOptions) -> int:
    """Layers of a drafter of these options, unless `init` names an export."""
    return len(_layer_types(options)[0])


def _rope_theta(text: Any) -> float:
    """The target's RoPE base. UserError if its config has none."""
    theta = rope_theta(text)
    if theta is None:
        raise UserError("the target's config has no rope_theta: set --drafter.rope-theta")
    return theta


def export_taps(options: DrafterOptions) -> tuple[int, ...] | None:
    """Taps of the export that `init` names, or None for the other kinds of init."""
    if not is_export(options.init):
        return None
    return read_export(Path(options.init)).target_layer_ids


def build_drafter(
    options: DrafterOptions, target_options: TargetOptions, target: Target
) -> Drafter:
    """The drafter on the target's device, initialised. Uses torch's global random state.

    UserError if the export of `init` does not pair with the target or disagrees with an option.
    """
    if is_export(options.init):
        drafter = load_export(Path(options.init))
        check_pairing(drafter.config, target)
        check_own_vocabulary(options.init, target)
        _check_export(options, target_options, drafter.config)
        # A drafter of others may not say; from here on it does.
        drafter.config = replace(drafter.config, num_target_layers=target.num_layers)
        return drafter.to(target.device)
    drafter = Drafter(drafter_config(options, target, target_options.mask_token_id))
    if options.init == "target":
        layers = decoder_layers(target.model, target.num_layers)
        init_from_target(drafter, layers, _final_norm(target.model, layers))
    return drafter.to(target.device)


def _check_export(
    options: DrafterOptions, target_options: TargetOptions, config: DrafterConfig
) -> None:
    wanted = {
        name: value
        for name, value in vars(options).items()
        if name != "init" and value is not None and hasattr(config, name)
    }
    if target_options.mask_token_id is not None:
        wanted["mask_token_id"] = target_options.mask_token_id
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise UserError(
                f"init {options.init}: its {name} is {getattr(config, name)}, the options say "
                f"{value}; an export keeps its shape, set the option to that value"
            )


def _final_norm(model: nn.Module, layers: nn.ModuleList) -> Tensor | None:
    """Weight of the norm beside the decoder layers (Llama and Qwen call it `norm`)."""
    for parent in model.modules():
        if any(child is layers for child in parent.children()):
            return getattr(getattr(parent, "norm", None), "weight", None)
    return None


@torch.no_grad()
def init_from_target(drafter: Drafter, layers: nn.ModuleList, final_norm: Tensor | None) -> None:
    """Start the drafter as the target's own last L decoder layers.

    `layers` are the target's decoder layers with Llama / Qwen parameter names (self_attn.q_proj,
    mlp.gate_proj, input_layernorm, ...), `final_norm` its final norm weight [H] or None for 1.
    `fc` becomes the identity on the last tap and `hidden_norm` 1, so the first context is that tap
    normalised; q_norm / k_norm are the target's, or 1 where it has none (RMSNorm by 1 is then a
    change of scale that training absorbs). A bias the target has and the drafter lacks is dropped.
    UserError if a parameter is missing or of another shape: choose the drafter's head counts,
    head_dim and intermediate_size equal to the target's, or init "random".
    """
    config = drafter.config
    if len(layers) < config.num_layers:
        raise UserError(
            f"init 'target': the drafter has {config.num_layers} layers, "
            f"the target only {len(layers)}; use fewer layers or init 'random'"
        )
    first = len(layers) - config.num_layers
    for i, layer in enumerate(drafter.stack()):
        source = weights_of(layers[first + i])
        wanted = {name for name, _ in layer.named_parameters()}
        if extra := [name for name in source if name not in wanted and not name.endswith(".bias")]:
            raise UserError(
                f"init 'target': target layer {first + i} has {extra[0]}, which a drafter layer "
                "lacks, so its weights would mean something else there; use init 'random'"
            )
        for name, parameter in layer.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")) and name not in source:
                parameter.fill_(1.0)
                continue
            if name.endswith(".bias") and name not in source:
                parameter.zero_()
                continue
            found = tuple(source[name].shape) if name in source else None
            if found != tuple(parameter.shape):
                raise UserError(
                    f"init 'target': {name} is {found or 'missing'} in target layer {first + i}, "
                    f"expected {tuple(parameter.shape)}; give the drafter the target's shapes "
                    "or use init 'random'"
                )
            parameter.copy_(source[name])
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -config.hidden_size :].fill_diagonal_(1.0)
    drafter.hidden_norm.weight.fill_(1.0)
    drafter.norm.weight.copy_(torch.ones(config.hidden_size) if final_norm is None else final_norm)
