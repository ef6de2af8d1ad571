"""Drafters that are wrong: what reading them says, and `python -m dflash_ext.export`."""

# ruff: noqa: F811 (fixtures are imported by name)

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored_drafters import arguments, edited, target, world  # noqa: F401
from test_export import trained
from tiny_targets import VOCAB, one_thread, tiny_model  # noqa: F401

from dflash_ext.checkpoint import Progress, Snapshot, write_snapshot
from dflash_ext.drafter import Drafter, DrafterConfig
from dflash_ext.errors import UserError, run_cli
from dflash_ext.export import load_export, main, problems_of, read_export


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("head_dim"), "key head_dim is missing"),
        (lambda c: c.pop("attention_bias"), "key attention_bias is missing"),
        (lambda c: c.pop("num_target_layers"), "key num_target_layers is missing"),
        (lambda c: c.pop("layer_types"), "key layer_types is missing"),
        (lambda c: c.pop("dflash_config"), "key dflash_config is missing"),
        (
            lambda c: c["dflash_config"].pop("mask_token_id"),
            "dflash_config.mask_token_id is missing",
        ),
        (lambda c: (c.pop("rope_theta"), c.pop("rope_parameters")), "key rope_theta is missing"),
        (lambda c: c.update(rope_theta=5.0), "rope_theta is given twice and differs"),
        (lambda c: c.update(block_size=8), "block_size is given twice and differs"),
        (lambda c: c.update(num_hidden_layers="2"), "num_hidden_layers is '2', expected int"),
        (lambda c: c.update(hidden_size=0), "fc.weight expected 3 taps × 0, got 192 columns"),
        (lambda c: c.update(attention_bias=1), "attention_bias is 1, expected bool"),
        (lambda c: c.update(rms_norm_eps=True), "rms_norm_eps is True, expected float"),
        (lambda c: c.update(layer_types="full"), "layer_types is 'full', expected list"),
        (lambda c: c.update(sliding_window=1.5), "sliding_window is 1.5, expected int"),
        (lambda c: c.update(is_causal="no"), "is_causal is 'no', expected bool"),
        (lambda c: c.update(rope_parameters=[1]), r"rope_parameters is \[1\], expected dict"),
        (lambda c: c.update(dflash_config=[1]), r"dflash_config is \[1\], expected dict"),
        (
            lambda c: c["dflash_config"].update(target_layer_ids=[0, "b"]),
            "dflash_config.target_layer_ids holds 'b', expected int only",
        ),
        (
            lambda c: c["dflash_config"].update(mask_token_id="x"),
            "dflash_config.mask_token_id is 'x', expected int",
        ),
        (lambda c: c.update(rope_scaling={"type": "yarn"}), "rope_scaling .* is not supported"),
        (
            lambda c: c["rope_parameters"].update(partial_rotary_factor=0.5),
            "rope_parameters.partial_rotary_factor 0.5 is not supported",
        ),
        (lambda c: c.update(final_tap_normed=True), "final_tap_normed True is not supported"),
        (lambda c: c.update(label_shift=1), "label_shift 1 is not supported"),
        (
            lambda c: c["dflash_config"].update(target_layer_ids=[0, 1, 2, 3]),
            "fc.weight expected 4 taps × 64, got 3",
        ),
        (
            lambda c: c.update(intermediate_size=80),
            r"gate_proj.weight expected \(80, 64\), got \(96",
        ),
    ],
)
def test_a_wrong_config_is_named(world, tmp_path, change, message):
    with pytest.raises(UserError, match=message) as error:
        load_export(edited(world, tmp_path, change))
    assert "\n" not in str(error.value)


def test_wrong_files_are_named(world, tmp_path):
    name = "layers.1.self_attn.k_norm.weight"

    def break_tensors(tensors):
        del tensors[name]
        tensors["model.x"] = torch.ones(1)

    folder = edited(world, tmp_path, change_tensors=break_tensors)
    with pytest.raises(UserError, match=f"tensor {name} is missing; .*tensor model.x is unknown"):
        load_export(folder)
    tensors = load_file(str(folder / "model.safetensors"))
    save_file(tensors | {"fc.weight": torch.tensor(1.0)}, str(folder / "model.safetensors"))
    with pytest.raises(UserError, match=r"fc.weight expected 3 taps × 64, got 1 columns"):
        load_export(folder)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"config.json: expected a JSON object"):
        load_export(folder)
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(UserError, match="cannot be read"):
        load_export(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"is no drafter export: model.safetensors is missing"):
        load_export(folder)


def test_published_configs_with_one_rope_key_are_read(world, tmp_path):
    for key in ("rope_theta", "rope_parameters"):
        folder = edited(world, tmp_path / key, lambda c, k=key: c.pop(k))
        assert load_export(folder).config.rope_theta == 1e4
        assert problems_of(folder, None) == []


def test_shards_are_read_as_one_file_and_stay_in_their_folder(world, tmp_path):
    folder = edited(world, tmp_path)
    tensors = load_file(str(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    of = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
    for part in set(of.values()):
        save_file({n: t for n, t in tensors.items() if of[n] == part}, str(folder / part))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": of}))
    for name, parameter in load_export(folder).named_parameters():
        assert torch.equal(parameter, tensors[name].float()), name
    assert problems_of(folder, None) == []
    index.write_text(json.dumps({"weight_map": of | {"norm.weight": "../x.safetensors"}}))
    with pytest.raises(UserError, match="is no file of this folder"):
        load_export(folder)


CHECKS = {
    "taps out of range": (
        lambda c: c["dflash_config"].update(target_layer_ids=[0, 2, 7]),
        ["target_layer_ids has 7, expected ids 0..3", "taps [7] are no layers of the target"],
    ),
    "taps unsorted": (
        lambda c: c["dflash_config"].update(target_layer_ids=[2, 0, 3]),
        ["target_layer_ids [2, 0, 3] must ascend"],
    ),
    "taps twice": (
        lambda c: c["dflash_config"].update(target_layer_ids=[0, 0, 3]),
        ["target_layer_ids [0, 0, 3] must be one or more distinct"],
    ),
    "taps absent": (
        lambda c: c["dflash_config"].pop("target_layer_ids"),
        ["key dflash_config.target_layer_ids is missing"],
    ),
    "another number of target layers": (
        lambda c: c.update(num_target_layers=5),
        ["expected a target of 5 layers, got 4"],
    ),
    "vocabulary": (
        lambda c: c.update(vocab_size=128),
        ["expected a vocabulary of 128, got 96"],
    ),
    "mask out of range": (
        lambda c: c["dflash_config"].update(mask_token_id=96),
        ["mask_token_id 96 is outside", "mask token 96 is no row of the embedding (96 rows)"],
    ),
    "mask is pad": (
        lambda c: c["dflash_config"].update(mask_token_id=0),
        ["mask token 0 is a pad, eos or bos token of the target"],
    ),
    "mask is eos": (
        lambda c: c["dflash_config"].update(mask_token_id=2),
        ["mask_token_id 2 is its own eos_token_id", "mask token 2 is a pad, eos or bos"],
    ),
    "block sizes": (
        lambda c: c["dflash_config"].update(block_size=8),
        ["key block_size is given twice and differs: [4, 8]"],
    ),
    "block size": (
        lambda c: (c.update(block_size=5), c["dflash_config"].update(block_size=5)),
        ["block_size 5 is not supported"],
    ),
    "rope thetas": (
        lambda c: c.update(rope_theta=2e4),
        ["key rope_theta is given twice and differs: [20000.0, 10000.0]"],
    ),
    "rope": (
        lambda c: (
            c["rope_parameters"].update(rope_type="yarn", factor=4.0, mrope_section=[8, 4, 4]),
            c.update(partial_rotary_factor=0.25, rope_scaling={"type": "linear"}),
        ),
        [
            "rope_parameters.rope_type 'yarn' is not supported",
            "rope_parameters.factor 4.0 is not supported",
            "rope_parameters.mrope_section [8, 4, 4] is not supported",
            "partial_rotary_factor 0.25 is not supported",
            "rope_scaling {'type': 'linear'} is not supported",
        ],
    ),
    "layer types": (
        lambda c: c.update(layer_types=["full_attention"]),
        ["expected 2 layer_types (num_layers), got 1", "use_sliding_window is True, but"],
    ),
    "unknown layer types": (
        lambda c: c.update(layer_types=["sliding_attention", "linear_attention"]),
        ["layer_types ['linear_attention'] are unknown"],
    ),
    "window": (
        lambda c: c.update(sliding_window=None),
        ["sliding_attention layers need sliding_window of at least 1, got None"],
    ),
    "head_dim": (
        lambda c: c.update(head_dim=96),
        ["drafter head_dim 96 is not supported: use (64, 128, 256)"],
    ),
    "head ratio": (
        lambda c: c.update(num_attention_heads=34),
        ["num_heads 34 for num_kv_heads 1 is not supported: at most 16 query heads"],
    ),
    "heads": (
        lambda c: c.update(num_key_value_heads=3),
        ["num_heads 2 must be a multiple of num_kv_heads 3"],
    ),
    "for others": (
        lambda c: c.update(tie_word_embeddings=True, dtype="float16", model_type="llama"),
        ["model_type is 'llama'", "tie_word_embeddings is true", "dtype is 'float16'"],
    ),
    "arithmetic we do not do": (
        lambda c: c["dflash_config"].update(output_multiplier=0.2, use_swa=True, selector_rank=4),
        [
            "dflash_config.output_multiplier 0.2 is not supported, only 1.0",
            "dflash_config.selector_rank 4 is not supported",
            "dflash_config.use_swa True is not supported",
        ],
    ),
}


@pytest.mark.parametrize("fault", CHECKS)
def test_check_explains_every_fault_in_a_line(world, tmp_path, capsys, fault):
    change, expected = CHECKS[fault]
    folder = edited(world, tmp_path, change)
    assert main(["--check", str(folder), "--target", str(world / "t")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"{folder}: {len(lines) - 1} problem" in lines.pop()
    for text in expected:
        assert sum(text in line for line in lines) == 1, (text, lines)
    assert len(lines) == len(expected), lines


def test_check_explains_every_tensor(world, tmp_path, capsys):
    def break_tensors(tensors):
        del tensors["norm.weight"]
        tensors["lm_head.weight"] = torch.ones(2, 2, dtype=torch.bfloat16)
        tensors["layers.0.mlp.up_proj.weight"] = torch.ones(3, 64, dtype=torch.bfloat16)
        tensors["layers.0.input_layernorm.weight"] = torch.ones(64)
        tensors["layers.1.input_layernorm.weight"][3] = torch.nan
        tensors["hidden_norm.weight"] = torch.ones(64, dtype=torch.int8)

    folder = edited(world, tmp_path, change_tensors=break_tensors)
    assert main(["--check", str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "model.safetensors: tensor norm.weight is missing",
        "model.safetensors: tensor lm_head.weight is unknown",
        "model.safetensors: layers.0.mlp.up_proj.weight expected (96, 64), got (3, 64)",
        "model.safetensors: tensor hidden_norm.weight is I8, expected BF16",
        "model.safetensors: layers.0.input_layernorm.weight is F32, expected BF16",
        "model.safetensors: layers.1.input_layernorm.weight is not finite",
        f"{folder}: 6 problems, no target to compare with (--target)",
    ]


def test_check_of_a_drafter_for_another_target(world, tmp_path, capsys):
    other = tiny_model(hidden_size=128, num_hidden_layers=2, vocab_size=80)
    other.save_pretrained(tmp_path / "other")
    assert main(["--check", str(world / "zlab"), "--target", str(tmp_path / "other")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("other: ")[2] for line in lines[:-1]] == [
        "expected 3 taps × 64, got a width of 128",
        "taps [2, 3] are no layers of the target: expected ids 0..1",
        "expected a target of 4 layers, got 2",
        "expected a vocabulary of 96, got 80",
        "mask token 95 is no row of the embedding (80 rows)",
    ]


def test_check_notices_a_forward_that_differs(world, monkeypatch, capsys):
    real = Drafter.encode_context
    monkeypatch.setattr(Drafter, "encode_context", lambda self, f: real(self, f).roll(1, 0))
    assert main(["--check", str(world / "zlab")]) == 1
    assert "logits of an independent forward differ by" in capsys.readouterr().out


def test_check_of_a_good_drafter(world, capsys):
    for layout in ("zlab", "speculators"):
        assert main(["--check", str(world / layout), "--target", str(world / "t")]) == 0
        assert f"fine, target {world / 't'}; {layout} layout, 2 layers, block 4" in (
            capsys.readouterr().out
        )


def test_misuse_is_exit_code_2_and_one_line(world, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    out = ["--out", str(tmp_path / "out")]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    for arguments_, message in (
        ([str(world / "zlab"), "--out", str(tmp_path / "mine")], "it holds thesis.txt"),
        ([str(world / "zlab"), "--out", str(world / "zlab" / "config.json")], "it holds a file"),
        ([], "nothing to do"),
        (["--check", str(tmp_path / "none")], "no such directory"),
        (["--check", str(world / "zlab"), *out], "leave the source, --out and --step out"),
        (["--check", str(world / "zlab"), "--target", str(tmp_path)], "no readable config.json"),
        ([str(world / "zlab")], "--out is missing"),
        ([str(world / "zlab"), "--step", "3", *out], "--step is for a run"),
        ([str(tmp_path / "empty"), *out], "is neither a drafter's directory"),
        ([str(world / "zlab"), "--layout", "speculators", *out], "give the target"),
    ):
        with pytest.raises(SystemExit) as stop:
            run_cli(lambda given=arguments_: main(given))
        assert stop.value.code == 2
        shown = capsys.readouterr().err
        assert message in shown
        assert shown.count("\n") == 1
    assert main(["--check", str(tmp_path / "empty")]) == 1  # a directory, but no drafter
    assert "is no drafter export: config.json is missing" in capsys.readouterr().out


def test_a_run_s_checkpoint_becomes_a_drafter_of_either_layout(world, target, tmp_path, capsys):
    run = tmp_path / "run"
    drafter = trained(target)
    fields = dataclasses.asdict(drafter.config)
    run.mkdir()
    (run / "resolved.json").write_text(json.dumps({"target": str(world / "t"), "drafter": fields}))
    with pytest.raises(UserError, match=r"has no checkpoint: it has none"):
        main([str(run), *arguments("zlab", tmp_path / "x")])
    weights = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    for step in (3, 10):
        state = {name: tensor + step for name, tensor in weights.items()}
        write_snapshot(run / "checkpoints", Snapshot(state, {}, Progress(step)), keep=2)
    for step, layout, given in ((10, "zlab", []), (3, "speculators", ["--step", "3"])):
        out = tmp_path / layout
        assert main([str(run), *arguments(layout, out), *given]) == 0
        for name, parameter in load_export(out).named_parameters():
            assert torch.equal(parameter, (weights[name] + step).bfloat16().float())
    assert DrafterConfig(**vars(read_export(out))) == drafter.config
    shutil.copytree(world / "zlab", run / "best" / "export")  # names its target by the run
    assert main([str(run / "best"), *arguments("speculators", tmp_path / "best")]) == 0
    assert read_export(tmp_path / "best") == drafter.config
    capsys.readouterr()
    assert main(["--check", str(run / "best")]) == 0
    assert f"fine, target {world / 't'}" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"no checkpoint of step 4: it has \[3, 10\]"):
        main([str(run), *arguments("zlab", tmp_path / "x"), "--step", "4"])
    (run / "resolved.json").write_text("{}")
    with pytest.raises(UserError, match="does not describe a drafter"):
        main([str(run), *arguments("zlab", tmp_path / "x")])
