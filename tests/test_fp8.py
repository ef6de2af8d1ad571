"""Rows, weights and targets in FP8: the format, the products, and what a target makes of them."""

from __future__ import annotations

import gc
import json
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_target import fused_layers, packed, true_taps
from tiny_targets import one_thread, tiny_model  # noqa: F401

from dflash_ext.config import DrafterOptions, TargetOptions
from dflash_ext.errors import UserError
from dflash_ext.fp8 import Fp8Linear, quantise_layers
from dflash_ext.initialise import build_drafter
from dflash_ext.ops.quantise import Quantised, quantise_rows, scaled_product
from dflash_ext.rates import TargetCost
from dflash_ext.target import Target
from dflash_ext.target_loading import WHOLE, Needs


def e4m3_numbers() -> np.ndarray:
    """Every finite E4M3 number, from the format's definition (bias 7, no infinities)."""
    positive = [m / 8 * 2.0**-6 for m in range(8)]  # subnormal
    positive += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    positive.pop()  # the last code is NaN
    return np.array(sorted({*positive, *(-x for x in positive)}))


NUMBERS = e4m3_numbers()


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.sampled_from([16, 48]), st.booleans(), st.floats(1e-6, 1e6))
def test_rows_are_rounded_to_the_nearest_number_of_their_grid(seed, K, gated, size):
    generator = torch.Generator().manual_seed(seed)
    x = size * torch.randn(3, K, generator=generator)
    x[1] = 0
    up = torch.randn(3, K, generator=generator) if gated else None
    values, scales = quantise_rows(x, up)
    truth = x.double() if up is None else (x.double() * torch.sigmoid(x.double()) * up.double())
    assert scales[1] == 1
    torch.testing.assert_close(scales[0], truth[0].abs().max().float() / 448, rtol=1e-6, atol=0)
    scaled = (truth / scales.double()[:, None]).numpy()
    found = values.double().numpy()
    assert np.isin(found, NUMBERS).all()
    nearest = np.abs(scaled[..., None] - NUMBERS).min(-1)
    # A value between two numbers may fall to either when fp32 moves it over the middle.
    assert (np.abs(scaled - found) <= nearest + 1e-5 * np.abs(scaled) + 1e-12).all()


def test_products_are_those_of_the_rounded_numbers():
    x, w = torch.randn(5, 32), torch.randn(48, 32)
    a, b = quantise_rows(x), quantise_rows(w)
    found = scaled_product(a, b, torch.float32)
    exact = [q.values.double() * q.scales.double()[:, None] for q in (a, b)]
    torch.testing.assert_close(found.double(), exact[0] @ exact[1].T, rtol=1e-5, atol=1e-5)
    assert (found - x @ w.T).norm() < 0.06 * (x @ w.T).norm()


def test_linear_takes_rows_that_are_quantised_already():
    linear = torch.nn.Linear(32, 48, dtype=torch.bfloat16)
    ours, x = Fp8Linear(linear), torch.randn(2, 3, 32).bfloat16()
    out = ours(x)
    assert out.shape == (2, 3, 48)
    assert torch.equal(ours(quantise_rows(x.view(6, 32))).view(2, 3, 48), out)
    assert isinstance(quantise_rows(x.view(6, 32)), Quantised)
    truth = torch.nn.functional.linear(x.float(), linear.weight.float(), linear.bias.float())
    assert (out.float() - truth).norm() < 0.06 * truth.norm()
    assert (ours.weight.float() - linear.weight.float()).norm() < 0.04 * linear.weight.norm()


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "gemma3", "qwen3_moe"])
def test_targets_in_fp8(family):
    """A number keeps 4 bits where bf16 keeps 8: the error is at most 16 times its own."""
    batch, errors, cost = packed(), [], []
    truth = torch.cat([true_taps(tiny_model(family, head_dim=64), batch)[i] for i in (0, 2)], -1)
    for accelerated in (True, False):
        model = tiny_model(family, head_dim=64).bfloat16()
        target = Target(model, tap_ids=(0, 2), accelerated=accelerated)
        before = (target.features(batch).features.float() - truth).norm()
        cost.append(TargetCost.of(target))
        target.quantise()
        assert TargetCost.of(target) == cost[0]
        assert fused_layers(target) == 4 * accelerated
        errors.append((target.features(batch).features.float() - truth).norm())
        assert before < errors[-1] < 16 * before
    assert errors[0] < 1.3 * errors[1]  # ours is as near as transformers' own layers


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_moe"])
def test_what_fp8_replaces_is_freed_at_once(family):
    """Python's collector may come after the memory is needed: 56 GiB of a 30B target in bf16."""
    target = Target(tiny_model(family, head_dim=64).bfloat16(), tap_ids=(0, 2))
    weights = {
        name: weakref.ref(weight)
        for name, weight in target.model.named_parameters()
        if "layers" in name and "proj" in name
    }
    gc.collect()
    gc.disable()
    try:
        target.quantise()
        alive = [name for name, weight in weights.items() if weight() is not None]
    finally:
        gc.enable()
    assert len(weights) >= 16
    assert not alive


def test_a_drafter_takes_its_weights_from_a_target_in_fp8():
    model = tiny_model(head_dim=64).bfloat16()
    weight = model.model.layers[3].mlp.up_proj.weight.clone()
    target = Target(model, tap_ids=(0, 2))
    target.quantise()
    drafter = build_drafter(
        DrafterOptions(num_layers=1, block_size=4), TargetOptions(mask_token_id=90), target
    )
    found = drafter.layers[0].mlp.up_proj.weight
    assert (found - weight.float()).norm() < 0.04 * weight.float().norm()


def test_a_checkpoint_in_fp8_loads_as_the_numbers_it_stands_for(tmp_path):
    """Blocks of 32 x 32 with a scale each, as DeepSeek and Qwen publish them (128 x 128)."""
    tiny_model("qwen3", head_dim=64).bfloat16().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors, truth = load_file(tmp_path / "model.safetensors"), {}
    for name in [name for name in tensors if "proj" in name]:
        blocks = tensors[name].float().unflatten(1, (-1, 32)).unflatten(0, (-1, 32))
        scale = blocks.abs().amax((1, 3)) / 448
        values = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        tensors[name] = values.flatten(2).flatten(0, 1)
        tensors[f"{name}_scale_inv"] = scale
        truth[name] = (values.float() * scale[:, None, :, None]).flatten(2).flatten(0, 1)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for needs in (WHOLE, Needs("taps", head=False)):
        target = Target.load(tmp_path, dtype="bf16", tap_ids=(0, 1), needs=needs)
        loaded = {n: p for n, p in target.model.named_parameters() if n in truth}
        assert len(loaded) == 7 * (4 if needs is WHOLE else 2)
        for name, parameter in loaded.items():
            assert torch.equal(parameter, truth[name].bfloat16())
        target.quantise()
        assert fused_layers(target) == (4 if needs is WHOLE else 2)


def test_an_exchange_that_fails_leaves_the_target_reading_as_before(monkeypatch):
    """Attention of a packed forward must be ours as long as `features` packs."""
    target, batch = Target(tiny_model(head_dim=64).bfloat16(), tap_ids=(0, 2)), packed()
    before = target.features(batch).features

    def fail(_layers, *_):
        raise torch.OutOfMemoryError("no room for a copy")

    monkeypatch.setattr("dflash_ext.target.quantise_layers", fail)
    with pytest.raises(torch.OutOfMemoryError):
        target.quantise()
    assert fused_layers(target) == 4
    assert torch.equal(target.features(batch).features, before)


def test_what_cannot_be_in_fp8_is_refused():
    with pytest.raises(
        UserError, match=r"--target.fp8 needs a target in bf16, this one is in .*32"
    ):
        Target(tiny_model(head_dim=64)).quantise()
    odd = torch.nn.Sequential(torch.nn.Linear(24, 16), torch.nn.Linear(16, 32))
    assert quantise_layers([odd]) == 1
    assert isinstance(odd[0], torch.nn.Linear)
    with pytest.raises(ValueError, match="K a multiple of 16"):
        quantise_rows(torch.zeros(2, 24))
    with pytest.raises(UserError, match=r"--target.fp8 needs --target.dtype bf16"):
        TargetOptions(fp8=True, dtype="fp32")
