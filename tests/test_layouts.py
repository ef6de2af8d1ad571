"""The speculators layout: its schema, its words, drafters of that library, conversion."""

# ruff: noqa: F811 (fixtures are imported by name)

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored_drafters import arguments, edited, target, world  # noqa: F401
from test_export import SHAPES, trained
from tiny_targets import VOCAB, one_thread, tiny_model  # noqa: F401

from dflash_ext.config import DrafterOptions, TargetOptions
from dflash_ext.errors import UserError
from dflash_ext.export import load_export, main, problems_of, read_export, save_export
from dflash_ext.initialise import build_drafter


def test_the_speculators_schema(world):
    """Fields of DFlashSpeculatorConfig 0.9, whose own model class loaded such a file (docs)."""
    config = json.loads((world / "speculators" / "config.json").read_text())
    zlab = json.loads((world / "zlab" / "config.json").read_text())
    decoder = config.pop("transformer_layer_config")
    shared = zlab.keys() - {"architectures", "num_target_layers", "block_size", "dflash_config"}
    shared -= {"final_tap_normed", "label_shift"}
    assert decoder == {key: zlab[key] for key in shared}
    greedy = {"proposal_type": "greedy", "speculative_tokens": 3}
    assert config == {
        "architectures": ["DFlashDraftModel"],
        "dtype": "bfloat16",
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**greedy, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {
                "name_or_path": str(world / "t"),
                "architectures": ["LlamaForCausalLM"],
            },
        },
        "draft_vocab_size": VOCAB,
        "block_size": 4,
        "target_hidden_size": 64,
        "aux_hidden_state_layer_ids": [1, 3, 4],
        "mask_token_id": VOCAB - 1,
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "num_target_layers": 4,
        "final_tap_normed": False,
        "label_shift": 0,
    }


def test_their_word_for_causality(target, tmp_path):
    """Without sliding layers it says nothing to them, but vLLM makes a global override of it."""
    for shape, non_causal in (("full", True), ("sliding", False), ("sliding bidirectional", True)):
        folder = save_export(
            trained(target, **SHAPES[shape]), tmp_path / shape, target=target, layout="speculators"
        )
        config = json.loads((folder / "config.json").read_text())
        assert config["sliding_window_non_causal"] is non_causal
        config["transformer_layer_config"].pop("is_causal", None)  # theirs has no such key
        (folder / "config.json").write_text(json.dumps(config))
        bidirectional = False if shape == "sliding bidirectional" else None
        assert read_export(folder).is_causal is bidirectional
    with pytest.raises(UserError, match="no in-block causality for full-attention layers"):
        save_export(
            trained(target, **SHAPES["full causal"]), tmp_path, target=target, layout="speculators"
        )
    with pytest.raises(UserError, match=r"names its target \(verifier\): give the target"):
        save_export(trained(target), tmp_path, layout="speculators")


def test_conversion_there_and_back_is_exact_to_the_bit(world, tmp_path, capsys):
    there, back = tmp_path / "there", tmp_path / "back"
    assert main([*map(str, (world / "zlab",)), *arguments("speculators", there, world / "t")]) == 0
    assert main([str(there), *arguments("zlab", back)]) == 0  # the target is named in `there`
    for a, b in ((there, world / "speculators"), (back, world / "zlab")):
        for file in ("config.json", "model.safetensors"):
            assert (a / file).read_bytes() == (b / file).read_bytes(), (a, file)
    assert "reloaded, and equal to an independent forward" in capsys.readouterr().out
    shutil.rmtree(back)
    copied = edited(world, tmp_path)  # as is, without any target: what it says is kept
    assert main([str(copied), *arguments("zlab", back)]) == 0
    assert (back / "config.json").read_bytes() == (world / "zlab" / "config.json").read_bytes()


def foreign(config: dict) -> None:
    """A config.json without what only our exports say."""
    for key in ("num_target_layers", "final_tap_normed", "label_shift", "target_hidden_size"):
        del config[key]
    decoder = config["transformer_layer_config"]
    for key in ("rope_theta", "rope_scaling", "dtype"):
        del decoder[key]


def test_a_drafter_of_the_speculators_library_is_read_and_trained_on(world, target, tmp_path):
    embedding, head = target.vocabulary()

    def bring_vocabulary(tensors):
        tensors |= {
            "embed_tokens.weight": embedding.bfloat16().clone(),
            "lm_head.weight": head.bfloat16().clone(),
            "verifier_norm.weight": torch.ones(64, dtype=torch.bfloat16),
            "d2t": torch.zeros(VOCAB, dtype=torch.int64),
            "t2d": torch.ones(VOCAB, dtype=torch.bool),
        }

    folder = edited(world, tmp_path, foreign, bring_vocabulary, layout="speculators")
    own = load_export(world / "zlab")
    assert read_export(folder) == dataclasses.replace(own.config, num_target_layers=None)
    assert problems_of(folder, None) == []
    assert main(["--check", str(folder)]) == 0
    options = DrafterOptions(init=str(folder))
    drafter = build_drafter(options, TargetOptions(), target)
    assert drafter.config == own.config  # the target's layers are known from here on
    for a, b in zip(drafter.parameters(), own.parameters()):
        assert torch.equal(a, b)

    with pytest.raises(UserError, match="says how many layers the target has, this drafter does"):
        save_export(load_export(folder), tmp_path / "x")
    tensors = load_file(str(folder / "model.safetensors"))
    tensors["lm_head.weight"][0] += 1
    save_file(tensors, str(folder / "model.safetensors"))
    with pytest.raises(UserError, match=r"lm_head.weight is not the target's"):
        build_drafter(options, TargetOptions(), target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(speculators_model_type="dspark"), "speculators_model_type 'dspark' is"),
        (lambda c: c.update(sample_from_anchor=True), "sample_from_anchor True is not supported"),
        (lambda c: c.update(draft_vocab_size=32), "draft_vocab_size 32 of 96: a reduced voc"),
        (
            lambda c: c.update(aux_hidden_state_layer_ids=[0, 1, 2]),
            "has 0, the embedding's output",
        ),
        (lambda c: c.update(aux_hidden_state_layer_ids=[1, 2, 5]), r"has 4, expected ids 0\.\.3"),
        (lambda c: c.pop("aux_hidden_state_layer_ids"), "key aux_hidden_state_layer_ids is miss"),
        (lambda c: c.update(mask_token_id=None), "key mask_token_id is missing"),
        (lambda c: c.update(target_hidden_size=32), "hidden_size 64 must equal the target's 32"),
        (lambda c: c.pop("transformer_layer_config"), "key transformer_layer_config is missing"),
        (
            lambda c: c["transformer_layer_config"].update(is_causal=False),
            "sliding_window_non_causal is given twice and differs",
        ),
        (
            lambda c: c["transformer_layer_config"].pop("head_dim"),
            "key transformer_layer_config.head_dim is missing",
        ),
    ],
)
def test_a_wrong_speculators_config_is_named(world, tmp_path, change, message):
    with pytest.raises(UserError, match=message) as error:
        load_export(edited(world, tmp_path, change, layout="speculators"))
    assert "\n" not in str(error.value)


def test_a_reduced_vocabulary_is_refused_by_its_maps(world, tmp_path):
    def reduce(tensors):
        tensors["d2t"] = torch.arange(VOCAB)
        tensors["t2d"] = torch.arange(VOCAB) % 2 == 0

    folder = edited(world, tmp_path, change_tensors=reduce, layout="speculators")
    with pytest.raises(UserError, match=r"d2t maps to other tokens.*t2d leaves tokens out"):
        load_export(folder)
