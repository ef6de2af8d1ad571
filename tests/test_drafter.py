"""The drafter against the independent reference, its leakage, its cache and its initialisation."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch
from reference_drafter import reference_hidden
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dflash_ext.drafter import Drafter, DrafterConfig
from dflash_ext.errors import UserError
from dflash_ext.initialise import init_from_target
from dflash_ext.layers import fixed_weights, let_casts_go

CONFIG = DrafterConfig(
    hidden_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=80,
    vocab_size=100,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_position_embeddings=512,
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=5,
    block_size=4,
    mask_token_id=99,
    target_layer_ids=(0, 2, 3),
    num_target_layers=4,
    target_hidden_size=48,
)


def make(seed: int = 0, **changes) -> Drafter:
    torch.manual_seed(seed)
    drafter = Drafter(dataclasses.replace(CONFIG, **changes))
    for parameter in drafter.parameters():  # norms away from 1, scores away from uniform
        parameter.data += 0.1 * torch.randn_like(parameter)
    return drafter


def exported(config: DrafterConfig) -> dict:
    """The config.json keys the reference reads."""
    return {
        "rms_norm_eps": config.rms_norm_eps,
        "head_dim": config.head_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "block_size": config.block_size,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "is_causal": config.is_causal,
        "rope_theta": config.rope_theta,
    }


class Case:
    """Three packed documents (6, 1 and 11 tokens); anchors with empty, short and long contexts."""

    lengths = (6, 1, 11)
    anchors = ((0, 0), (0, 5), (1, 0), (2, 3), (2, 10))  # (document, in-document position)

    def __init__(self, config: DrafterConfig, seed: int = 1) -> None:
        torch.manual_seed(seed)
        starts = [0, 6, 7]
        self.doc_of_ctx = [d for d, n in enumerate(self.lengths) for _ in range(n)]
        self.pos_of_ctx = [p for n in self.lengths for p in range(n)]
        self.T, self.N, B = sum(self.lengths), len(self.anchors), config.block_size
        self.features = torch.randn(self.T, config.feature_width)
        self.embeds = torch.randn(self.N + 1, config.hidden_size)  # anchors' tokens, mask token
        self.ctx_start = torch.tensor([starts[d] for d, _ in self.anchors], dtype=torch.int32)
        self.ctx_end = torch.tensor([starts[d] + a for d, a in self.anchors], dtype=torch.int32)
        self.block_positions = torch.tensor([a + k for _, a in self.anchors for k in range(B)])

    def run(self, drafter: Drafter, features=None, embeds=None, rows=None):
        features = self.features if features is None else features
        embeds = self.embeds if embeds is None else embeds
        return drafter(
            embeds,
            drafter.encode_context(features),
            self.block_positions,
            torch.tensor(self.pos_of_ctx),
            drafter.layouts(self.ctx_start, self.ctx_end, self.T),
            rows,
        )

    def slots(self) -> torch.Tensor:
        """Embeddings of all slots, [N*B, H]."""
        B = len(self.block_positions) // self.N
        mask = self.embeds[-1].expand(B - 1, -1)
        return torch.cat([x for anchor in self.embeds[:-1] for x in (anchor[None], mask)])

    def truth(self, drafter: Drafter, state=None) -> torch.Tensor:
        return reference_hidden(
            state or {name: tensor.double() for name, tensor in drafter.state_dict().items()},
            exported(drafter.config),
            self.features.double(),
            self.doc_of_ctx,
            self.pos_of_ctx,
            self.slots().double(),
            [d for d, _ in self.anchors],
            [a for _, a in self.anchors],
        )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"is_causal": False},
        {"is_causal": True, "layer_types": ("full_attention",) * 2, "sliding_window": None},
        {"attention_bias": True, "num_kv_heads": 4, "block_size": 8},
        {"layer_types": ("sliding_attention",) * 2, "sliding_window": 1},
    ],
    ids=["mixed", "sliding bidirectional", "full causal", "bias, MHA, B=8", "window 1"],
)
def test_forward_equals_reference(changes):
    drafter = make(**changes)
    case = Case(drafter.config)
    torch.testing.assert_close(
        case.run(drafter).double(), case.truth(drafter), rtol=1e-4, atol=1e-4
    )


def test_parameter_names_are_the_checkpoint_s():
    names = set(dict(make().named_parameters()))
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    for i in range(2):
        for leaf in (
            "input_layernorm",
            "post_attention_layernorm",
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "self_attn.q_norm",
            "self_attn.k_norm",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        ):
            expected.add(f"layers.{i}.{leaf}.weight")
    assert names == expected == set(make().state_dict())


def test_invisible_rows_change_nothing_by_one_bit():
    """Requirement 6 through the whole model, output and gradient."""
    drafter = make()
    case = Case(drafter.config)
    block = 3  # document 2, anchor at 3: sees rows 7, 8, 9 of the packed context
    rows = slice(block * 4, block * 4 + 4)

    def run(features, embeds):
        features, embeds = features.clone().requires_grad_(), embeds.clone().requires_grad_()
        drafter.zero_grad()
        out = case.run(drafter, features, embeds)[rows]
        out.square().sum().backward()
        grads = [p.grad.clone() for p in drafter.parameters()]
        return [out.detach(), features.grad[7:10], embeds.grad[[block, -1]], *grads], features.grad

    before, feature_grad = run(case.features, case.embeds)
    hidden_rows = [*range(7), *range(10, 18)]
    assert feature_grad[hidden_rows].abs().max() == 0
    features, embeds = case.features.clone(), case.embeds.clone()
    features[hidden_rows] += 1e3
    embeds[:block] += 1e3
    embeds[block + 1 : -1] += 1e3
    after, _ = run(features, embeds)
    for a, b in zip(before, after):
        assert torch.equal(a, b)


@pytest.mark.parametrize("layers", [1, 2])
def test_rows_are_those_of_the_whole_forward_and_bring_the_same_gradients(layers):
    kinds = CONFIG.layer_types[-layers:]
    drafter = make(num_layers=layers, layer_types=kinds, attention_bias=True)
    case = Case(drafter.config)
    rows = torch.tensor([1, 2, 6, 13, 14, 15, 19])

    def run(wanted):
        drafter.zero_grad()
        out = case.run(drafter, rows=wanted)
        out = out if wanted is not None else out[rows]
        out.square().sum().backward()
        return [out.detach(), *(p.grad.clone() for p in drafter.parameters())]

    for found, expected in zip(run(rows), run(None), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_gradients_equal_the_reference_s():
    """Every parameter's, in fp64 by autograd through the independent forward."""
    drafter = make(attention_bias=True)
    case = Case(drafter.config)
    state = {name: p.detach().double().requires_grad_() for name, p in drafter.named_parameters()}
    case.truth(drafter, state).square().sum().backward()
    case.run(drafter).square().sum().backward()
    for name, parameter in drafter.named_parameters():
        truth = state[name].grad
        error = (parameter.grad.double() - truth).norm()
        assert error <= 1e-5 * truth.norm() + 1e-7, name


def test_fixed_weights_are_cast_once_and_forgotten():
    drafter = make()
    linear = drafter.layers[0].mlp.gate_proj
    with fixed_weights(drafter):
        cast = linear.cast(torch.bfloat16)
        assert linear.cast(torch.bfloat16) is cast
        assert linear.cast(torch.float32).data_ptr() == linear.weight.data_ptr()
    linear.weight.data += 1
    assert torch.equal(linear.cast(torch.bfloat16), linear.weight.bfloat16())
    assert linear.cast(torch.bfloat16) is not linear.cast(torch.bfloat16)


def test_the_last_forward_lets_casts_go_and_its_backward_casts_again():
    drafter = make()
    case = Case(drafter.config)
    last, alive = drafter.layers[-1].mlp.down_proj, []

    def run():
        out = case.run(drafter, case.features.bfloat16(), case.embeds.bfloat16())
        out.float().square().sum().backward()

    run()
    grads = [p.grad.clone() for p in drafter.parameters()]
    drafter.zero_grad()
    with fixed_weights(drafter):
        cast = weakref.ref(last.cast(torch.bfloat16))
        drafter.norm.register_forward_hook(lambda *_: alive.append(cast() is not None))
        run()
        drafter.zero_grad()
        let_casts_go(drafter)
        run()
    assert alive == [True, False]
    assert all(torch.equal(p.grad, g) for p, g in zip(drafter.parameters(), grads))


def test_bf16_compute_keeps_fp32_masters():
    drafter = make()
    case = Case(drafter.config)
    out = case.run(drafter, case.features.bfloat16(), case.embeds.bfloat16())
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    for parameter in drafter.parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all()
    truth = case.truth(drafter)
    assert (out.double() - truth).norm() / truth.norm() < 0.03


def test_config_errors_say_expected_and_got():
    for changes, message in (
        ({"hidden_size": 32}, "hidden_size 32 must equal the target's 48"),
        ({"target_layer_ids": (0, 4)}, "has 4, expected ids 0..3"),
        ({"target_layer_ids": (1, 1)}, "distinct"),
        ({"head_dim": 96}, "head_dim 96 is not supported"),
        ({"block_size": 10}, "block_size 10 is not supported"),
        ({"layer_types": ("full_attention",)}, "expected 2 layer_types"),
        ({"layer_types": ("full_attention", "linear")}, "unknown"),
        ({"sliding_window": None}, "need sliding_window"),
        ({"mask_token_id": 100}, "outside the vocabulary"),
        ({"num_kv_heads": 3}, "multiple"),
        ({"num_layers": 0}, "at least 1"),
    ):
        with pytest.raises(UserError, match=message):
            dataclasses.replace(CONFIG, **changes)
    with pytest.raises(UserError, match=r"expected features of 3 taps x 48 = 144 columns"):
        make().encode_context(torch.randn(5, 2 * 48))


SMALL = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 80,
    "vocab_size": 100,
}


def randomised(model):
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def test_init_from_llama_and_qwen3_copies_the_last_layers():
    torch.manual_seed(0)
    for config_class, model_class in (
        (LlamaConfig, LlamaForCausalLM),
        (Qwen3Config, Qwen3ForCausalLM),
    ):
        model = randomised(model_class(config_class(**SMALL)))
        drafter = make()
        init_from_target(drafter, model.model.layers, model.model.norm.weight)
        own = drafter.state_dict()
        theirs = model.model.state_dict()
        for i in range(2):
            for name in (
                "self_attn.q_proj",
                "self_attn.o_proj",
                "mlp.down_proj",
                "input_layernorm",
            ):
                key = f"{name}.weight"
                assert torch.equal(own[f"layers.{i}.{key}"], theirs[f"layers.{i + 1}.{key}"])
        q_norm = own["layers.0.self_attn.q_norm.weight"]
        if config_class is LlamaConfig:
            assert torch.equal(q_norm, torch.ones(64))
        else:
            assert torch.equal(q_norm, theirs["layers.1.self_attn.q_norm.weight"])
        assert torch.equal(own["norm.weight"], theirs["norm.weight"])
        tap = torch.randn(4, 3 * 48)
        torch.testing.assert_close(drafter.fc(tap), tap[:, -48:])  # identity on the last tap
        assert torch.equal(own["hidden_norm.weight"], torch.ones(48))


def test_init_from_qwen2_takes_its_bias_only_where_the_drafter_has_one():
    qwen2 = SMALL | {"hidden_size": 256}
    qwen2.pop("head_dim")  # Qwen2 derives it: 256 / 4
    torch.manual_seed(0)
    model = randomised(Qwen2ForCausalLM(Qwen2Config(**qwen2)))
    for bias in (True, False):
        drafter = make(hidden_size=256, target_hidden_size=256, attention_bias=bias)
        init_from_target(drafter, model.model.layers, model.model.norm.weight)
        if bias:
            own, theirs = drafter.layers[1].self_attn, model.model.layers[2].self_attn
            assert torch.equal(own.q_proj.bias, theirs.q_proj.bias)
            assert own.o_proj.bias.abs().max() == 0


def test_init_from_target_refuses_other_shapes():
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    with pytest.raises(UserError, match=r"mlp.gate_proj.weight is \(80, 48\).*expected \(96, 48\)"):
        init_from_target(make(intermediate_size=96), model.model.layers, None)
    drafter = make(num_layers=4, layer_types=("full_attention",) * 4)
    with pytest.raises(UserError, match="4 layers, the target only 3"):
        init_from_target(drafter, model.model.layers, None)
    odd = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(3)])
    with pytest.raises(UserError, match="has weight, which a drafter layer lacks"):
        init_from_target(make(), odd, None)
