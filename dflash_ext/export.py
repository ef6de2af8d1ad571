"""Checkpoints in the layout of published DFlash drafters: `config.json` + `model.safetensors`.

Serving engines skip unknown tensor names in silence, so an export is not trusted until it has been
read back and an independent forward (export_check.py) agrees with ours. Shapes: L layers, K taps,
Ht target hidden, H hidden, B block size, T context rows, N blocks.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_ext.drafter import Drafter, DrafterConfig
from dflash_ext.errors import UserError
from dflash_ext.export_check import StoredDrafter
from dflash_ext.target import Target

CONFIG, WEIGHTS = "config.json", "model.safetensors"
# DrafterConfig field -> key of config.json, where they are one to one.
KEYS = {
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
    "num_target_layers": "num_target_layers",
}


def config_json(config: DrafterConfig, target: Target | None = None) -> dict[str, Any]:
    """The content of `config.json`; bos and eos ids are the target's (null without one)."""
    text_config = None if target is None else target.model.config.get_text_config()
    sliding = "sliding_attention" in config.layer_types
    content: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        **{key: getattr(config, field) for field, key in KEYS.items()},
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_scaling": None,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window if sliding else None,
        "use_sliding_window": sliding,
        "tie_word_embeddings": False,
        "bos_token_id": getattr(text_config, "bos_token_id", None),
        "eos_token_id": getattr(text_config, "eos_token_id", None),
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            "block_size": config.block_size,
        },
        # How the weights were trained; engines ignore it, `load_export` does not.
        "final_tap_normed": False,
        "label_shift": 0,
    }
    if config.is_causal is not None:  # a global override in serving engines: only when meant
        content["is_causal"] = config.is_causal
    return content


def save_export(drafter: Drafter, directory: str | Path, *, target: Target | None = None) -> Path:
    """Write the export, prove it, then rename it into place (an older one is replaced).

    Everything happens in a temporary folder beside `directory`, private to the user. Raises
    UserError, leaving what was there before, if the reloaded export is not the drafter.
    """
    final = Path(directory)
    final.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        new = scratch / "new"
        new.mkdir(mode=0o700)
        content = json.dumps(config_json(drafter.config, target), indent=2)
        (new / CONFIG).write_text(content + "\n")
        tensors = {
            name: parameter.detach().to("cpu", torch.bfloat16).contiguous()
            for name, parameter in drafter.named_parameters()
        }
        save_file(tensors, str(new / WEIGHTS), metadata={"format": "pt"})
        prove(drafter, new)
        if final.exists():
            os.rename(final, scratch / "old")
        os.rename(new, final)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return final


@torch.no_grad()
def prove(drafter: Drafter, directory: Path) -> None:
    """UserError unless `directory` holds this drafter and is read as such independently.

    1. every parameter is stored under its name, as its own bf16 rounding, and nothing else is;
    2. the reloaded drafter and the independent forward agree in fp32: at anchors 0, 1, around the
       sliding window's edge, and at the far end of the position range.
    """
    stored, parameters = StoredDrafter(directory), dict(drafter.named_parameters())
    if odd := stored.names.symmetric_difference(parameters):
        raise UserError(f"export {directory}: stored and trained tensors differ in {sorted(odd)}")
    for name, parameter in parameters.items():
        if not torch.equal(stored.stored(name), parameter.detach().to("cpu", torch.bfloat16)):
            raise UserError(f"export {directory}: {name} is not stored as trained")
    config, reloaded = drafter.config, load_export(directory)
    window = config.sliding_window if "sliding_attention" in config.layer_types else None
    near = {0, 1, 7, 40} | (
        {window - 1, window, window + 1} if window and window <= 4096 else set()
    )
    far = config.max_position_embeddings - config.block_size - 8
    # A position p costs about p * 2**-24 rad of fp32 angle: the far end is told by gross errors.
    for anchors, first, tolerance in ((sorted(near), 0, 2e-4), ([2, 8], max(far, 0), 2e-2)):
        ours, theirs = _both_forwards(reloaded, stored, anchors, first)
        error = float((ours - theirs).abs().max() / theirs.abs().max())
        if not error <= tolerance:  # NaN fails too
            raise UserError(
                f"export {directory}: an independent forward differs by {error:.1e} of the largest "
                f"value (allowed {tolerance:.0e}) at anchors {anchors} from position {first}; "
                "the export is not usable"
            )


def _both_forwards(
    drafter: Drafter, stored: StoredDrafter, anchors: list[int], first: int
) -> tuple[Tensor, Tensor]:
    """Hidden rows [N, B, H] of a random document: by `drafter`, and independently."""
    config, N, T = drafter.config, len(anchors), max(anchors)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(T, config.feature_width, generator=generator)
    embeds = torch.randn(N + 1, config.hidden_size, generator=generator)
    masks = embeds[N:].expand(N, config.block_size - 1, -1)
    blocks = torch.cat([embeds[:N, None], masks], dim=1)
    starts = torch.zeros(N, dtype=torch.int32)
    ends = torch.tensor(anchors, dtype=torch.int32)
    slots = torch.tensor(anchors)[:, None] + torch.arange(config.block_size) + first
    ours = drafter(
        embeds,
        drafter.encode_context(features),
        slots.flatten(),
        torch.arange(T) + first,
        drafter.layouts(starts, ends, T),
    )
    return ours.view_as(blocks), stored.hidden(features, anchors, blocks, first)


def load_export(directory: str | Path) -> Drafter:
    """The drafter of an export, parameters as fp32 masters on the CPU.

    UserError naming whatever is missing, unknown, of the wrong shape, or not supported.
    """
    folder = Path(directory)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(f"{folder} is no drafter export: {name} is missing")
    try:
        content = json.loads((folder / CONFIG).read_text())
        state = load_file(str(folder / WEIGHTS))
    except (ValueError, SafetensorError) as error:
        raise UserError(f"{folder}: cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{folder / CONFIG}: expected a JSON object")
    config = read_config(content, str(folder / CONFIG), state)
    drafter = Drafter(config)
    parameters = dict(drafter.named_parameters())
    for what, names in (
        ("is missing", parameters.keys() - state.keys()),
        ("is unknown", state.keys() - parameters.keys()),
    ):
        if names:
            raise UserError(f"{folder / WEIGHTS}: tensor {', '.join(sorted(names))} {what}")
    for name, parameter in parameters.items():
        if state[name].shape != parameter.shape:
            raise UserError(
                f"{folder / WEIGHTS}: {name} expected {tuple(parameter.shape)}, "
                f"got {tuple(state[name].shape)}"
            )
        parameter.data.copy_(state[name])
    return drafter


def read_config(content: dict[str, Any], name: str, state: dict[str, Tensor]) -> DrafterConfig:
    """DrafterConfig of a `config.json`; `state` tells the target's width. Nothing is guessed."""

    def optional(key: str, kind: type) -> Any:
        section, _, inner = key.rpartition(".")
        value = ((optional(section, dict) or {}) if section else content).get(inner)
        # In JSON 1 is a fine 1.0, but `true` is no number.
        fits = type(value) in ((int, float) if kind is float else (kind,))
        if value is not None and not fits:
            raise UserError(f"{name}: key {key} is {value!r}, expected {kind.__name__}")
        return value

    def need(key: str, kind: type) -> Any:
        value = optional(key, kind)
        if value is None:
            raise UserError(f"{name}: key {key} is missing")
        return value

    def need_list(key: str, kind: type) -> tuple[Any, ...]:
        values = need(key, list)
        if wrong := [value for value in values if type(value) is not kind]:
            raise UserError(f"{name}: key {key} holds {wrong[0]!r}, expected {kind.__name__} only")
        return tuple(values)

    def agree(key: str, kind: type, section: str) -> Any:
        found = [optional(key, kind), optional(f"{section}.{key}", kind)]
        values = [value for value in found if value is not None]
        if not values:
            raise UserError(f"{name}: key {key} is missing")
        if any(value != values[0] for value in values):
            raise UserError(f"{name}: key {key} is given twice and differs: {values}")
        return values[0]

    for key, supported in (
        ("hidden_act", "silu"),
        ("rope_scaling", None),
        ("final_tap_normed", False),
        ("label_shift", 0),
    ):
        if content.get(key, supported) != supported:
            raise UserError(f"{name}: {key} {content[key]!r} is not supported, only {supported!r}")
    rope = optional("rope_parameters", dict) or {}
    if (
        rope.get("rope_type", "default") != "default"
        or rope.get("partial_rotary_factor", 1.0) != 1.0
    ):
        raise UserError(f"{name}: rope_parameters {rope} are not supported, only plain RoPE")
    need("dflash_config", dict)
    taps = need_list("dflash_config.target_layer_ids", int)
    kinds: dict[str, type] = {"rms_norm_eps": float, "attention_bias": bool}
    fields = {field: need(key, kinds.get(key, int)) for field, key in KEYS.items()}
    if "fc.weight" not in state:
        raise UserError(f"{name}: tensor fc.weight is missing from {WEIGHTS}")
    width, columns = fields["hidden_size"], state["fc.weight"].shape[-1:].numel()
    if columns != len(taps) * width:
        got = f"{columns // width}" if width and columns % width == 0 else f"{columns} columns"
        raise UserError(f"{name}: fc.weight expected {len(taps)} taps × {width}, got {got}")
    return DrafterConfig(
        **fields,
        rope_theta=agree("rope_theta", float, "rope_parameters"),
        layer_types=need_list("layer_types", str),
        sliding_window=optional("sliding_window", int),
        is_causal=optional("is_causal", bool),
        block_size=agree("block_size", int, "dflash_config"),
        mask_token_id=need("dflash_config.mask_token_id", int),
        target_layer_ids=taps,
        target_hidden_size=width,
    )


def check_pairing(config: DrafterConfig, target: Target) -> None:
    """UserError listing every way in which a drafter does not fit a target, in one line."""
    wrong: list[str] = []
    K, width = len(config.target_layer_ids), config.target_hidden_size
    if (K, width) != (len(target.tap_ids), target.hidden_size):
        got = len(target.tap_ids)
        same = width == target.hidden_size
        wrong.append(
            f"expected {K} taps × {width}, got {got}{'' if same else f' × {target.hidden_size}'}"
        )
    elif config.target_layer_ids != target.tap_ids:
        wrong.append(f"expected taps {list(config.target_layer_ids)}, got {list(target.tap_ids)}")
    if config.num_target_layers != target.num_layers:
        wrong.append(
            f"expected a target of {config.num_target_layers} layers, got {target.num_layers}"
        )
    rows = target.vocabulary().embedding.shape[0]
    sizes = {target.vocab_size, rows, target.model.config.get_text_config().vocab_size}
    if config.vocab_size not in sizes:
        wrong.append(f"expected a vocabulary of {config.vocab_size}, got {target.vocab_size}")
    if config.mask_token_id >= rows:
        wrong.append(f"mask token {config.mask_token_id} is no row of the embedding ({rows} rows)")
    if wrong:
        raise UserError(f"drafter and target {target.path!r} do not pair: " + "; ".join(wrong))
