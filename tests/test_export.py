"""Exports hold what was trained, prove it, and fail loudly if they do not (requirements 7, 22)."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from reference_drafter import reference_hidden
from safetensors.torch import load_file, save_file
from test_generate import drafter_for
from tiny_targets import VOCAB, one_thread, tiny_model  # noqa: F401

from dflash_ext import export
from dflash_ext.batch import PackedBatch
from dflash_ext.drafter import Drafter
from dflash_ext.drafting import Drafting
from dflash_ext.errors import UserError
from dflash_ext.export import check_pairing, load_export, prove, read_export, save_export
from dflash_ext.export_check import StoredDrafter
from dflash_ext.export_proof import prove_forward
from dflash_ext.generate import speculative_decode
from dflash_ext.target import Target

SHAPES = {
    "mixed": dict(layer_types=("sliding_attention", "full_attention"), sliding_window=12),
    "full": dict(layer_types=("full_attention",) * 2, sliding_window=None),
    "sliding": dict(layer_types=("sliding_attention",) * 2, sliding_window=1),
    "sliding bidirectional": dict(
        layer_types=("sliding_attention",) * 2, sliding_window=9, is_causal=False
    ),
    "full causal": dict(
        layer_types=("full_attention",) * 2, sliding_window=None, is_causal=True, num_kv_heads=2
    ),
    "bias": dict(attention_bias=True),
    "four heads to one": dict(num_heads=4),
}
PAIRS = [(shape, layout) for shape in SHAPES for layout in ("zlab", "speculators")]
PAIRS.remove(("full causal", "speculators"))  # which that layout cannot say


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(tie_word_embeddings=False), tap_ids=(0, 2, 3))


def trained(target: Target, **changes) -> Drafter:
    """As if trained: no parameter at its initial value."""
    drafter = drafter_for(target, block_size=4, **changes)
    torch.manual_seed(5)
    for parameter in drafter.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return drafter


@pytest.fixture(scope="module")
def saved(target, tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    return save_export(trained(target), tmp_path_factory.mktemp("saved") / "e", target=target)


def test_the_files_are_what_serving_engines_read(saved):
    folder = saved
    tensors = load_file(str(folder / "model.safetensors"))
    leaves = ["input_layernorm", "post_attention_layernorm"]
    leaves += [
        f"self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    ]
    leaves += [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    assert set(tensors) == {"fc.weight", "hidden_norm.weight", "norm.weight"} | {
        f"layers.{i}.{leaf}.weight" for i in range(2) for leaf in leaves
    }
    assert len(tensors) == 3 + 11 * 2
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert tensors["fc.weight"].shape == (64, 3 * 64)
    config = json.loads((folder / "config.json").read_text())
    assert config == {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "intermediate_size": 96,
        "vocab_size": VOCAB,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": 4096,
        "rope_theta": 1e4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "rope_scaling": None,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 12,
        "use_sliding_window": True,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_target_layers": 4,
        "block_size": 4,
        "dflash_config": {
            "mask_token_id": VOCAB - 1,
            "target_layer_ids": [0, 2, 3],
            "block_size": 4,
        },
        "final_tap_normed": False,
        "label_shift": 0,
    }


def test_bias_and_is_causal_are_written_only_when_there(target, tmp_path):
    folder = save_export(trained(target, **SHAPES["bias"]), tmp_path / "bias")
    tensors = load_file(str(folder / "model.safetensors"))
    assert sum(name.endswith(".bias") for name in tensors) == 4 * 2
    assert "is_causal" not in json.loads((folder / "config.json").read_text())
    folder = save_export(trained(target, **SHAPES["sliding bidirectional"]), tmp_path / "both")
    assert json.loads((folder / "config.json").read_text())["is_causal"] is False
    config = json.loads(
        (save_export(trained(target, **SHAPES["full"]), tmp_path / "f") / "config.json").read_text()
    )
    assert (config["sliding_window"], config["use_sliding_window"]) == (None, False)


@pytest.mark.parametrize(("shape", "layout"), PAIRS)
def test_round_trip_and_logits_of_three_readings(target, tmp_path, shape, layout):
    """What was saved comes back to the bit, and means the same to three independent forwards.

    Positions 0, 1, 4095, 8191: our forward, the shipped check's and the tests' own reference; the
    latter two in fp64, and neither imports drafter.py.
    """
    drafter = trained(target, **SHAPES[shape])
    folder = save_export(drafter, tmp_path / "out" / "export", target=target, layout=layout)
    stored, reloaded = StoredDrafter(folder), load_export(folder)
    assert reloaded.config == read_export(folder) == drafter.config
    for (name, a), (_, b) in zip(drafter.named_parameters(), reloaded.named_parameters()):
        assert b.dtype == torch.float32, name
        assert torch.equal(a.bfloat16().float(), b), name
    assert sorted(p.name for p in folder.parent.iterdir()) == ["export"]
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert folder.stat().st_mode & 0o077 == 0  # private to the user
    config = json.loads((folder / "config.json").read_text())
    if layout == "speculators":  # as that library's own model reads it
        non_causal = config["sliding_window_non_causal"]
        override = False if non_causal else None
        config = {**config["transformer_layer_config"], "block_size": 4, "is_causal": override}
    torch.manual_seed(1)
    anchors, B = [0, 1, 4095, 8191], 4
    T = anchors[-1]
    features = torch.randn(T, 3 * 64)
    embedding, head = target.vocabulary()
    blocks = embedding[torch.tensor([[5 + i] + [VOCAB - 1] * (B - 1) for i in range(4)])]
    truth = reference_hidden(
        {name: stored.stored(name) for name in stored.names},
        config,
        features.double(),
        [0] * T,
        list(range(T)),
        blocks.flatten(0, 1).double(),
        [0] * 4,
        anchors,
    )
    truth = truth @ head.T.double()
    shipped = stored.hidden(features.double(), anchors, blocks.double()).flatten(0, 1)
    torch.testing.assert_close(shipped @ head.T.double(), truth, rtol=1e-9, atol=1e-8)
    with torch.no_grad():
        ours = reloaded(
            torch.cat([blocks[:, 0], blocks[0, 1:2]]),  # anchors' tokens, the mask token
            reloaded.encode_context(features),
            torch.tensor([a + k for a in anchors for k in range(B)]),
            torch.arange(T),
            reloaded.layouts(
                torch.zeros(4, dtype=torch.int32), torch.tensor(anchors, dtype=torch.int32), T
            ),
        )
    error = (ours @ head.T - truth).abs().amax(1) / truth.abs().max()
    assert error[: 2 * B].max() < 2e-6  # near the start: rounding alone
    assert error.max() < 5e-4  # far from it: the fp32 angles of RoPE


def test_greedy_block_of_the_trainer_equals_an_independent_decode(target, saved):
    """Requirement 7: slot k predicts position a+k, in the trainer and in the exported files."""
    reloaded, stored = load_export(saved), StoredDrafter(saved)
    drafter = trained(target)
    text = list(range(3, 23))
    batch = PackedBatch.from_documents([(torch.tensor(text), torch.ones(len(text)))], [0])
    features = target.features(batch).features
    embedding, head = target.vocabulary()
    root, B = 50, 4
    block = embedding[[root] + [drafter.config.mask_token_id] * (B - 1)]
    drafts = (stored.hidden(features, [20], block[None])[0, 1:] @ head.T).argmax(-1).tolist()
    drafting = Drafting(reloaded, 1, 32, device="cpu", dtype=torch.float32)
    drafting.extend(features, torch.zeros(20, dtype=torch.int64), torch.arange(20), [20])
    assert (drafting.draft(block[:2])[1:] @ head.T).argmax(-1).tolist() == drafts
    assert len(set(drafts)) > 1


@pytest.mark.parametrize(
    ("break_it", "match"),
    [
        (lambda c, t: c.update(rope_theta=2e4, rope_parameters=None), "independent forward"),
        (lambda c, t: t["layers.1.mlp.up_proj.weight"].neg_(), "up_proj.weight is not stored as"),
        (lambda c, t: t.pop("norm.weight"), r"differ in \['norm.weight'\]"),
        (
            lambda c, t: t.update({"lm_head.weight": torch.ones(2)}),
            r"differ in \['lm_head.weight'\]",
        ),
    ],
)
def test_a_wrong_export_is_noticed(target, saved, tmp_path, break_it, match, monkeypatch):
    drafter, folder = trained(target), Path(shutil.copytree(saved, tmp_path / "e"))
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(str(folder / "model.safetensors"))
    break_it(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, str(folder / "model.safetensors"))
    # A trainer that shares the file's mistake would not see it; the live drafter stands for truth.
    monkeypatch.setattr(export, "load_export", lambda _: rounded(drafter))
    with pytest.raises(UserError, match=match) as error:
        prove(drafter, folder)
    assert "\n" not in str(error.value)


def rounded(drafter: Drafter) -> Drafter:
    copy = Drafter(drafter.config)
    copy.load_state_dict({k: v.bfloat16().float() for k, v in drafter.state_dict().items()})
    return copy


@pytest.mark.parametrize(
    "fault",
    [
        "context through input_layernorm",
        "window off by one",
        "anchor's own row visible",
        "no causality",
        "nan",
    ],
)
def test_a_forward_that_differs_is_noticed(target, saved, tmp_path, fault, monkeypatch):
    """Faults in the trainer's own forward: the export must fail, and leave the old one whole."""
    drafter, folder = trained(target), Path(shutil.copytree(saved, tmp_path / "e"))
    before = (folder / "config.json").read_bytes(), (folder / "model.safetensors").read_bytes()
    real = Drafter.layouts

    def layouts(self, start, end, num_ctx):
        if fault == "anchor's own row visible":
            end = torch.minimum(end + 1, torch.tensor(num_ctx))
        built = real(self, start, end, num_ctx)
        change = {"window off by one": ("window", 13), "no causality": ("causal", False)}.get(fault)
        if change:
            kind = "sliding_attention"
            built[kind] = dataclasses.replace(built[kind], **{change[0]: change[1]})
        return built

    monkeypatch.setattr(Drafter, "layouts", layouts)
    if fault == "context through input_layernorm":
        encode = Drafter.encode_context
        monkeypatch.setattr(
            Drafter,
            "encode_context",
            lambda self, f: self.layers[0].input_layernorm(encode(self, f)),
        )
    if fault == "nan":
        monkeypatch.setattr(Drafter, "encode_context", lambda self, f: f[:, :64] * math.nan)
    with pytest.raises(UserError, match="an independent forward differ by"):
        save_export(drafter, folder)
    after = (folder / "config.json").read_bytes(), (folder / "model.safetensors").read_bytes()
    assert after == before
    assert [p.name for p in tmp_path.iterdir()] == ["e"]


@pytest.mark.parametrize("window", [2047, 2049])
def test_a_wide_window_that_is_off_by_one_is_noticed(target, tmp_path, window):
    folder = save_export(trained(target, sliding_window=2048), tmp_path / "e", target=target)
    stored = StoredDrafter(folder)
    stored.config["sliding_window"] = window
    with pytest.raises(UserError, match=r"at anchors \[0, 1, 2047, 2048, 2049, 4095, 8191\]"):
        prove_forward(load_export(folder), stored, folder)


def test_replaces_an_older_export(target, tmp_path):
    save_export(trained(target), tmp_path / "e")
    other = trained(target, **SHAPES["full"])
    save_export(other, tmp_path / "e")
    assert load_export(tmp_path / "e").config == other.config
    assert [p.name for p in tmp_path.iterdir()] == ["e"]


def test_pairing_names_every_mismatch(target):
    check_pairing(trained(target).config, target)
    other = Target(tiny_model(hidden_size=128, num_hidden_layers=3, vocab_size=80), tap_ids=(0, 2))
    with pytest.raises(UserError) as error:
        check_pairing(trained(target).config, other)
    text = str(error.value)
    assert "expected 3 taps × 64, got 2 × 128" in text
    assert "expected a target of 4 layers, got 3" in text
    assert f"expected a vocabulary of {VOCAB}, got 80" in text
    assert f"mask token {VOCAB - 1} is no row of the embedding (80 rows)" in text
    assert "\n" not in text
    five = Target(tiny_model(), tap_ids=(3, 2, 0))
    with pytest.raises(UserError, match=r"expected taps \[0, 2, 3\], got \[3, 2, 0\]"):
        speculative_decode(five, trained(target), [5], 4)
    four = Target(tiny_model(), tap_ids=(0, 1, 2, 3))
    with pytest.raises(UserError, match="expected 3 taps × 64, got 4"):
        check_pairing(trained(target).config, four)
