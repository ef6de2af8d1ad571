"""A mixture of experts on our own path: against transformers' block and against a loop in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_targets import tiny_model

from dflash_ext.fp8 import Fp8Experts, quantise_layers
from dflash_ext.mixture import Mixture, is_mixture
from dflash_ext.ops.grouped import by_expert, grouped_product


def block(experts=4, k=2, hidden=32, width=16, normed=True, seed=0):
    """A router and experts, as transformers 5 holds them, with random weights."""
    options = {"num_experts": experts, "num_experts_per_tok": k, "moe_intermediate_size": width}
    options |= {"hidden_size": hidden, "norm_topk_prob": normed, "num_hidden_layers": 1}
    module = tiny_model("qwen3_moe", **options).model.layers[0].mlp
    torch.manual_seed(seed)
    for parameter in module.parameters():
        parameter.data.normal_(std=0.3)
    return module


def truth(module, x):
    """Expert by expert in fp64, from the router's own choice."""
    _, weights, chosen = module.gate(x)
    out = torch.zeros(x.shape, dtype=torch.float64)
    up, down = module.experts.gate_up_proj.double(), module.experts.down_proj.double()
    for t, row in enumerate(x.double()):
        for weight, e in zip(weights[t].double(), chosen[t].tolist()):
            gate, value = (up[e] @ row).chunk(2)
            out[t] += weight * (down[e] @ (torch.nn.functional.silu(gate) * value))
    return out


@given(
    T=st.integers(1, 40),
    experts=st.integers(1, 9),
    k=st.integers(1, 4),
    normed=st.booleans(),
    seed=st.integers(0, 99),
)
@torch.no_grad()
def test_any_routing(T, experts, k, normed, seed):
    module = block(experts, min(k, experts), normed=normed, seed=seed)
    assert is_mixture(module, "qwen3_moe")
    x = torch.randn(T, 32)
    expected = truth(module, x)
    found = Mixture(module)(x)
    assert found.dtype == torch.float32
    assert (found.double() - expected).norm() <= 1e-5 * expected.norm() + 1e-9
    own = module(x[None])
    own = (own[0] if isinstance(own, tuple) else own)[0]
    torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_bf16_errs_no_more_than_twice_transformers():
    module = block(experts=8, k=3)
    x = torch.randn(200, 32)
    rounded = module.bfloat16()
    expected = truth(rounded, x.bfloat16())
    found = Mixture(rounded)(x.bfloat16())
    own = rounded(x.bfloat16()[None])
    own = (own[0] if isinstance(own, tuple) else own)[0]
    error, theirs = ((y.double() - expected).norm() for y in (found, own))
    assert found.dtype == torch.bfloat16
    assert error <= 2 * theirs + 1e-3 * expected.norm()


@pytest.mark.parametrize("experts", [3, 256, 300])
def test_rows_are_sorted_and_counted(experts):
    chosen = torch.randint(experts, (1000,))
    chosen[:2] = torch.tensor([0, experts - 1])
    order, ends = by_expert(chosen, experts)
    assert torch.equal(order, chosen.sort(stable=True).indices)
    assert torch.equal(ends.long(), torch.bincount(chosen, minlength=experts).cumsum(0))
    assert ends.dtype == torch.int32


def test_an_expert_without_rows_takes_none():
    weights = torch.randn(3, 5, 4)
    x, ends = torch.randn(6, 4), torch.tensor([2, 2, 6], dtype=torch.int32)
    expected = torch.cat([x[:2] @ weights[0].T, x[2:] @ weights[2].T])
    torch.testing.assert_close(grouped_product(x, weights, ends), expected)


def test_what_is_another_block_stays_the_model_s():
    gpt = tiny_model("gpt_oss", head_dim=64).model.layers[0].mlp
    assert not is_mixture(gpt, "gpt_oss")
    dense = tiny_model("llama").model.layers[0].mlp
    assert not is_mixture(dense, "qwen3_moe")
    assert not is_mixture(block(), "another_moe")
    other = block()
    other.experts.act_fn = torch.nn.GELU()
    assert not is_mixture(other, "qwen3_moe")


@torch.no_grad()
def test_experts_in_fp8_are_those_of_the_rounded_numbers():
    """Against bf16 they err as E4M3 does; the module and `Mixture` agree to the bit."""
    module = block(experts=6, k=2, hidden=32, width=48).bfloat16()
    x = torch.randn(90, 32).bfloat16()
    expected = truth(module, x)
    plain = Mixture(module)(x).double()
    holder = torch.nn.ModuleList([module])
    assert quantise_layers(holder, lambda m: is_mixture(m, "qwen3_moe")) == 1
    assert isinstance(module.experts, Fp8Experts)
    assert is_mixture(module, "qwen3_moe")
    values, scales = module.experts.down_values, module.experts.down_scales
    assert values.dtype == torch.float8_e4m3fn
    assert (values.shape, scales.shape) == ((6, 32, 48), (6 * 32,))
    found = Mixture(module)(x)
    _, weights, chosen = module.gate(x)
    assert torch.equal(found, module.experts(x, chosen, weights))
    error, own = ((y - expected).norm() / expected.norm() for y in (found.double(), plain))
    assert own < 0.01 < error < 0.08


def test_experts_that_do_not_fit_stay():
    module = block(experts=2, k=1, hidden=32, width=24)  # 24 is no multiple of 16
    assert quantise_layers(torch.nn.ModuleList([module]), lambda m: is_mixture(m, "qwen3_moe")) == 0
    assert quantise_layers(torch.nn.ModuleList([block()])) == 0  # nobody said it is one
