"""The drafter's shape from the target, and its first weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny_targets import VOCAB, one_thread, tiny_model  # noqa: F401

from dflash_ext.config import DrafterOptions, TargetOptions
from dflash_ext.errors import UserError
from dflash_ext.export import save_export
from dflash_ext.initialise import build_drafter, drafter_config, export_taps
from dflash_ext.target import Target

MASK = VOCAB - 3


def target_of(family="llama", **changes) -> Target:
    return Target(tiny_model(family, head_dim=64, **changes), tap_ids=(0, 2))


def test_shape_is_the_target_s_unless_an_option_says_otherwise():
    target = target_of(rope_parameters={"rope_type": "default", "rope_theta": 12345.0})
    config = drafter_config(DrafterOptions(num_layers=3), target, MASK)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (64, 96, VOCAB)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 64)
    assert (config.rope_theta, config.max_position_embeddings) == (12345.0, 4096)
    assert config.target_layer_ids == (0, 2)
    assert config.num_target_layers == 4
    assert config.layer_types == ("full_attention",) * 3
    assert config.sliding_window is None
    assert config.mask_token_id == MASK

    options = DrafterOptions(
        num_layers=3,
        num_heads=2,
        num_kv_heads=1,
        head_dim=128,
        intermediate_size=32,
        rope_theta=7.0,
        sliding_window=9,
        block_size=16,
        is_causal=False,
    )
    config = drafter_config(options, target, MASK)
    assert config.layer_types == ("sliding_attention",) * 2 + ("full_attention",)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (2, 1, 128)
    assert (config.intermediate_size, config.rope_theta, config.sliding_window) == (32, 7.0, 9)
    assert (config.block_size, config.is_causal) == (16, False)


def test_rope_base_of_layer_types_is_the_full_attention_one():
    config = drafter_config(DrafterOptions(), target_of("gemma3"), MASK)
    theta = target_of("gemma3").model.config.rope_parameters["full_attention"]["rope_theta"]
    assert config.rope_theta == theta


def test_what_the_target_lacks_is_asked_for_by_an_option_that_exists():
    names = {f"--drafter.{f.name.replace('_', '-')}" for f in dataclasses.fields(DrafterOptions)}
    for lacking in ("intermediate_size", "rms_norm_eps", "max_position_embeddings"):
        target = target_of()
        vars(target.model.config)[lacking] = None  # past the checks of its setter
        with pytest.raises(UserError, match=f"has no {lacking}") as error:
            drafter_config(DrafterOptions(), target, MASK)
        named = {word for word in str(error.value).split() if word.startswith("--")}
        assert named == ({"--drafter.intermediate-size"} if lacking.startswith("inter") else set())
        assert named <= names


def test_unsupported_head_dim_of_the_target_is_an_error_with_the_supported_set():
    with pytest.raises(UserError, match=r"head_dim 16 is not supported: use \(64, 128, 256\)"):
        drafter_config(DrafterOptions(), Target(tiny_model("llama")), MASK)


def test_inits():
    target, taps = target_of(), TargetOptions(mask_token_id=MASK)
    theirs = target.model.model.state_dict()

    def build(init, seed=0):
        torch.manual_seed(seed)
        return build_drafter(DrafterOptions(init=init), taps, target).state_dict()

    own = build("target")
    name = "mlp.up_proj.weight"
    assert torch.equal(own[f"layers.1.{name}"], theirs[f"layers.3.{name}"])
    assert torch.equal(own["norm.weight"], theirs["norm.weight"])
    random = build("random")
    assert not torch.equal(random[f"layers.1.{name}"], theirs[f"layers.3.{name}"])
    assert torch.equal(random["fc.weight"], build("random")["fc.weight"])  # the seed's
    assert not torch.equal(random["fc.weight"], build("random", seed=1)["fc.weight"])


def test_init_target_of_another_architecture_is_an_error():
    options = DrafterOptions(init="target")
    with pytest.raises(UserError, match="a drafter layer lacks"):
        build_drafter(options, TargetOptions(mask_token_id=MASK), target_of("gemma3"))
    with pytest.raises(UserError, match=r"mlp.gate_proj.weight|a drafter layer lacks"):
        build_drafter(options, TargetOptions(mask_token_id=MASK), target_of("qwen3_moe"))


def test_init_from_an_export(tmp_path):
    target, mask = target_of(), TargetOptions(mask_token_id=MASK)
    first = build_drafter(DrafterOptions(init="random", block_size=4), mask, target)
    path = str(save_export(first, tmp_path / "export", target=target))
    options = DrafterOptions(init=path, block_size=4)
    assert export_taps(options) == (0, 2)
    assert export_taps(DrafterOptions()) is None
    second = build_drafter(options, TargetOptions(), target)
    for a, b in zip(first.parameters(), second.parameters()):
        assert torch.equal(a.bfloat16().float(), b)
        assert b.dtype == torch.float32
    for changes, message in (
        ({"block_size": 8}, "its block_size is 4, the options say 8"),
        ({"num_heads": 2}, "its num_heads is 4, the options say 2"),
    ):
        with pytest.raises(UserError, match=message):
            build_drafter(dataclasses.replace(options, **changes), TargetOptions(), target)
    assert build_drafter(DrafterOptions(init=path), TargetOptions(), target).config == second.config
    with pytest.raises(UserError, match=r"its mask_token_id is 93, the options say 0"):
        build_drafter(options, TargetOptions(mask_token_id=0), target)
    with pytest.raises(UserError, match="mask_token_id"):
        build_drafter(options, TargetOptions(mask_token_id=MASK + 1), target)
    other = Target(tiny_model("llama", head_dim=64), tap_ids=(0, 1, 2))
    with pytest.raises(UserError, match="expected 2 taps × 64, got 3"):
        build_drafter(options, TargetOptions(), other)


def test_layer_types_of_the_options():
    target, full, sliding = target_of(), "full_attention", "sliding_attention"

    def shape(**options):
        config = drafter_config(DrafterOptions(**options), target, MASK)
        return config.layer_types, config.sliding_window

    assert shape(layer_types=("4xsliding", "full")) == ((sliding,) * 4 + (full,), 2048)
    assert shape(layer_types=(sliding, "full"), sliding_window=9) == ((sliding, full), 9)
    assert shape(num_layers=5, sliding_window=2048) == ((sliding,) * 4 + (full,), 2048)
    assert shape(layer_types=("3xfull",)) == ((full,) * 3, None)
    for options, message in (
        ({"layer_types": ("2xsliding", "full"), "num_layers": 5}, "add --drafter.num-layers 3"),
        ({"num_layers": 1, "sliding_window": 9}, "no layer would slide"),
        ({"layer_types": ("2xfull",), "sliding_window": 9}, "no layer would slide"),
        ({"layer_types": ("slide",)}, "expected full or sliding"),
        ({"layer_types": ("0xfull",)}, "expected full or sliding"),
        ({"layer_types": ("xfull",)}, "expected full or sliding"),
        ({"layer_types": ("-1xfull",)}, "expected full or sliding"),
    ):
        with pytest.raises(UserError, match=message):
            shape(**options)
