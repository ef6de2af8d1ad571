"""Reading, checking and converting drafters of both layouts; `python -m dflash_ext.export`."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_export import SHAPES, trained
from tiny_targets import VOCAB, one_thread, tiny_model, tiny_tokenizer  # noqa: F401

from dflash_ext.checkpoint import Progress, Snapshot, write_snapshot
from dflash_ext.config import DrafterOptions, TargetOptions
from dflash_ext.drafter import Drafter, DrafterConfig
from dflash_ext.errors import UserError, run_cli
from dflash_ext.export import load_export, main, problems_of, read_export, save_export
from dflash_ext.initialise import build_drafter
from dflash_ext.target import Target

TAPS = (0, 2, 3)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A target directory `t`, the same drafter in both layouts: `zlab`, `speculators`."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("world")
    model = tiny_model(tie_word_embeddings=False)
    model.save_pretrained(root / "t")
    tiny_tokenizer().save_pretrained(root / "t")
    target = Target(model, tap_ids=TAPS, path=str(root / "t"))
    for layout in ("zlab", "speculators"):
        save_export(trained(target), root / layout, target=target, layout=layout)
    return root


@pytest.fixture(scope="module")
def target(world) -> Target:
    return Target.load(world / "t", tap_ids=TAPS)


def edited(world, tmp_path, change=lambda c: None, change_tensors=None, layout="zlab") -> Path:
    """A copy of the drafter in a layout with its config.json or its tensors changed."""
    folder = Path(shutil.copytree(world / layout, tmp_path / "edited"))
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    if change_tensors is not None:
        tensors = load_file(str(folder / "model.safetensors"))
        change_tensors(tensors)
        save_file(tensors, str(folder / "model.safetensors"))
    return folder


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


def arguments(layout: str, out: Path, target: Path | None = None) -> list[str]:
    named = [] if target is None else ["--target", str(target)]
    return ["--layout", layout, "--out", str(out), *named]


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
    for arguments_, message in (
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
