"""Part of a target: what every rank needs, that only this is read, and that the rest is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from test_target import packed
from tiny_targets import FAMILIES, one_thread, tiny_hybrid, tiny_model, tiny_tokenizer  # noqa: F401

from dflash_ext.config import DrafterOptions, EvalOptions, LossOptions, TopologyOptions, TrainConfig
from dflash_ext.data.synthesis import synthesize
from dflash_ext.errors import UserError
from dflash_ext.generate import plain_decode
from dflash_ext.rates import TargetCost
from dflash_ext.startup import load_target, needs_of, release
from dflash_ext.target import Target
from dflash_ext.target_loading import WHOLE, Absent, Needs, Shape, parameter_shapes, values_loaded
from dflash_ext.teacher import check_teacher, final_norm
from dflash_ext.topology import Topology

TAPS = (0, 2)  # of 4 layers
CAPTURES = Needs("taps", head=False)
TRAINS = Needs("nothing")
MIB = 2**20


def saved(folder: Path, model, shard: str = "40KB") -> Path:
    """A sharded checkpoint of many small files."""
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def spoil(folder: Path, unneeded) -> int:
    """Delete, or fill with nonsense, every shard all of whose tensors are `unneeded`; how many."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    gone = {f for f in index.values() if all(unneeded(n) for n, g in index.items() if g == f)}
    for i, file in enumerate(sorted(gone)):
        if i % 2:
            (folder / file).unlink(missing_ok=True)
        else:
            (folder / file).write_bytes(b"no weights at all")
    return len(gone)


def config_of(arrangement: str = "shared", **changes) -> TrainConfig:
    config = TrainConfig(drafter=DrafterOptions(init="random"), eval=EvalOptions(prompts_per_set=0))
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, train="rows.jsonl"))
    if arrangement == "ranks":
        config = dataclasses.replace(config, topology=TopologyOptions(2, 2))
    return dataclasses.replace(config, **changes)


class TestNeeds:
    ranks = Topology(2, 2, shared=False)  # drafters 0 and 1, targets 2 and 3

    def of(self, config: TrainConfig, rank: int, dtype: str = "bf16") -> Needs:
        return needs_of(config, self.ranks, rank, dtype)

    def test_ranks(self):
        config = config_of("ranks")
        assert [self.of(config, r) for r in range(4)] == [TRAINS, TRAINS, CAPTURES, CAPTURES]
        assert TRAINS.layers(4, TAPS) == set()
        assert CAPTURES.layers(36, (33, 1)) == set(range(34))

    def test_a_drafter_that_begins_as_the_target_s_last_layers(self):
        config = config_of("ranks", drafter=DrafterOptions(init="target", num_layers=3))
        assert self.of(config, 0).layers(8, TAPS) == {5, 6, 7}
        assert self.of(config, 2) == CAPTURES
        shared = needs_of(config, Topology(), 0, "bf16")
        assert shared.layers(8, TAPS) == {0, 1, 2, 5, 6, 7}
        assert Needs("nothing", last_layers=9).layers(8, TAPS) == set(range(8))

    def test_a_teacher_runs_to_its_last_layer(self):
        config = config_of("ranks", loss=LossOptions(kind="kl"))
        assert self.of(config, 0) == TRAINS
        assert self.of(config, 3) == Needs("layers", head=False)
        assert self.of(config, 3).layers(8, TAPS) == set(range(8))

    def test_whoever_decodes_needs_all_of_it(self):
        every = EvalOptions(prompts_per_set=1, decode_every=5)
        config = config_of("ranks", eval=every)
        assert [self.of(config, r) for r in range(4)] == [TRAINS, TRAINS, WHOLE, CAPTURES]
        assert needs_of(config, Topology(), 0, "bf16") == WHOLE
        # Before and after, it decodes in fp32: with this one if it is that, else with another.
        config = config_of(eval=EvalOptions(prompts_per_set=1))
        assert needs_of(config, Topology(), 0, "fp32") == WHOLE
        assert needs_of(config, Topology(), 0, "bf16") == Needs("taps")
        own = dataclasses.replace(config_of("ranks"), data=TrainConfig().data)  # it writes the data
        assert {self.of(own, r) for r in range(4)} == {WHOLE}


@pytest.mark.parametrize("family", [*FAMILIES, "hybrid", "untied"])
def test_what_is_loaded_is_the_whole_model_s(family, tmp_path, capfd, caplog):
    """Bit for bit, from a checkpoint whose other shards are gone, and without a word."""
    if family == "hybrid":
        model = tiny_hybrid()
    else:
        untied = {"tie_word_embeddings": False} if family == "untied" else {}
        model = tiny_model("qwen2" if family == "untied" else family, **untied)
    tied = model.config.tie_word_embeddings
    folder, batch = saved(tmp_path, model), packed()
    whole = Target.load(folder, tap_ids=TAPS)
    truth, cost = whole.features(batch).features, TargetCost.of(whole)
    # Copies: weights on the CPU are the file's pages, and the file is written anew below.
    vocabulary = [matrix.clone() for matrix in whole.vocabulary()]
    norm = whole.model.model.norm.weight.clone()

    assert spoil(folder, lambda n: n.startswith("model.layers.3.") or n == "lm_head.weight") > 1
    capfd.readouterr()
    caplog.clear()
    cut = Target.load(folder, tap_ids=TAPS, needs=CAPTURES)
    assert (capfd.readouterr().err, caplog.text) == ("", "")
    assert torch.equal(cut.features(batch).features, truth)
    assert [isinstance(layer, Absent) for layer in cut.model.model.layers] == [False] * 3 + [True]
    assert isinstance(cut.model.lm_head, Absent) != tied
    assert type(cut.model) is type(whole.model)
    assert (cut.num_layers, cut.path, cut.whole) == (4, str(folder), False)
    assert parameter_shapes(cut.model) == {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert TargetCost.of(cut) == cost
    loaded = {cut: CAPTURES, whole: WHOLE}
    for one in loaded:
        for other, needs in loaded.items():
            size = values_loaded(one.model, 4, TAPS, needs)
            assert size == sum(p.numel() for p in other.model.parameters())

    if not tied:
        saved(folder, model)
    assert spoil(folder, lambda n: n.startswith("model.layers.")) > 4
    drafter = Target.load(folder, tap_ids=TAPS, needs=TRAINS)
    for ours, theirs in zip(drafter.vocabulary(), vocabulary, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(drafter.model.model.norm.weight, norm)
    left = sum(p.numel() for p in drafter.model.parameters())
    assert left == 96 * 64 * (1 if tied else 2) + 64  # embedding, head, final norm
    assert TargetCost.of(drafter) == cost


def test_of_one_file_only_what_is_needed_is_read(tmp_path):
    model, batch = tiny_model("qwen3"), packed()
    model.save_pretrained(tmp_path)
    truth = Target.load(tmp_path, tap_ids=TAPS).features(batch).features
    # The last layer's weights are not there at all, the head's are of another shape.
    weights = load_file(tmp_path / "model.safetensors")
    weights = {n: w for n, w in weights.items() if not n.startswith("model.layers.3.")}
    weights["lm_head.weight"] = torch.zeros(2, 2)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    cut = Target.load(tmp_path, tap_ids=TAPS, needs=CAPTURES)
    assert torch.equal(cut.features(batch).features, truth)


def test_the_last_layers_are_there_for_the_drafter_to_begin_as(tmp_path):
    model = tiny_model("llama")
    target = Target.load(saved(tmp_path, model), tap_ids=TAPS, needs=Needs("taps", last_layers=1))
    own = dict(model.named_parameters())
    for name, weight in target.model.named_parameters():
        assert torch.equal(weight, own[name])
    assert len(list(target.model.parameters())) == len(own)
    target.keep(Needs("taps"))
    assert [isinstance(x, Absent) for x in target.model.model.layers] == [False] * 3 + [True]
    assert torch.equal(
        target.features(packed()).features, Target(model, tap_ids=TAPS).features(packed()).features
    )


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3"])
def test_what_a_part_cannot_do_is_refused(family, tmp_path):
    saved(tmp_path, tiny_model(family, tie_word_embeddings=False))
    tiny_tokenizer(("user", "assistant")).save_pretrained(tmp_path)
    captures = Target.load(tmp_path, tap_ids=TAPS, needs=CAPTURES)
    trains = Target.load(tmp_path, tap_ids=TAPS, needs=TRAINS)
    last = Target.load(tmp_path, tap_ids=TAPS, needs=CAPTURES)
    last.hand_over_last_layer()
    ids = torch.tensor([[3, 4, 5]])
    places = torch.arange(3)[None]
    no_head = Target.load(tmp_path, tap_ids=TAPS, needs=Needs("layers", head=False))
    for part, use in {
        "decoder layer 3": lambda: captures.forward_with_taps(ids, places, tf.DynamicCache()),
        "layer 3": lambda: captures.model(ids),
        "r layer 3": lambda: last.features(packed()),
        "decoder layer 0": lambda: trains.features(packed()),
        "coder layer 3": lambda: plain_decode(captures, [3, 4], 2),
        "er layer 3": lambda: synthesize(captures.model, captures.tokenizer, count=1),
        "the head": captures.vocabulary,
        "head": lambda: no_head.model(ids),
    }.items():
        with pytest.raises(UserError, match=f"{part} of the target is not loaded") as error:
            use()
        assert "\n" not in str(error.value)


def test_a_missing_weight_is_an_error_that_names_it(tmp_path, capfd):
    """It began at random, in silence but for a table."""
    model = tiny_model("qwen3")
    folder = saved(tmp_path, model)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = "model.layers.1.mlp.up_proj.weight"
    file = folder / index["weight_map"][name]
    weights = load_file(file)
    del weights[name], index["weight_map"][name]
    save_file(weights | {"spare": torch.zeros(1)}, file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    capfd.readouterr()
    for needs in (WHOLE, CAPTURES):
        with pytest.raises(UserError, match=rf"lacks {name}, which would begin at random") as error:
            Target.load(folder, tap_ids=TAPS, needs=needs)
        assert "\n" not in str(error.value)
    assert capfd.readouterr().err == ""
    Target.load(folder, tap_ids=TAPS, needs=TRAINS)  # which has no use for it


def test_tensors_without_a_use_and_wrong_shapes_are_named(tmp_path, caplog):
    model = tiny_model("qwen2")
    folder = saved(tmp_path, model, "1GB")
    weights = load_file(folder / "model.safetensors")
    more = {f"extra.{i}": torch.zeros(1) for i in range(5)}
    save_file(weights | more, folder / "model.safetensors", {"format": "pt"})
    for needs in (WHOLE, CAPTURES):
        caplog.clear()
        Target.load(folder, tap_ids=TAPS, needs=needs)
        assert "no use for extra.0, extra.1, extra.2 and 2 more of its" in caplog.text
    weights["model.norm.weight"] = torch.zeros(3)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for needs in (WHOLE, CAPTURES):
        with pytest.raises(UserError, match=r"model\.norm\.weight \(\[3\], expected \[64\]\)"):
            Target.load(folder, tap_ids=TAPS, needs=needs)


def test_a_damaged_index_is_a_user_error(tmp_path):
    folder = saved(tmp_path, tiny_model("llama"))
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())
    places["weight_map"]["model.norm.weight"] = "elsewhere.safetensors"
    for text, match in (("{}", "is damaged"), (json.dumps(places), "elsewhere.* is missing")):
        index.write_text(text)
        with pytest.raises(UserError, match=match) as error:
            Target.load(folder, tap_ids=TAPS, needs=CAPTURES)
        assert "\n" not in str(error.value)


def test_a_vision_tower_is_not_taken_for_the_decoder():
    """Its layers may have the decoder's name, and the checkpoint other prefixes than the model."""
    from dflash_ext.target_loading import unneeded_tensors

    shape = Shape(object, None, 4, "model.text.embed_tokens", "model.text.layers", "lm_head", ())
    names = [
        "language.model.embed_tokens.weight",
        "vision.encoder.layers.3.mlp.weight",
        *(f"language.model.layers.{i}.mlp.weight" for i in range(14)),
        "language.lm_head.weight",
        "lm_head.weight",
    ]
    unneeded = unneeded_tensors(names, shape, ["model.text.layers.3", "lm_head"])
    gone = {"language.model.layers.3.mlp.weight", "lm_head.weight"}
    assert {name for name in names if unneeded(name)} == gone
    assert not any(map(unneeded_tensors(names[1:], shape, ["model.text.layers.3"]), names[1:]))


def test_the_final_norm_is_found_without_the_layers(tmp_path):
    for i, family in enumerate(["qwen3_moe", "gemma3", "mistral"]):
        folder = saved(tmp_path / str(i), tiny_model(family))
        whole = Target.load(folder, tap_ids=TAPS)
        part = Target.load(folder, tap_ids=TAPS, needs=TRAINS)
        expected, layers = final_norm(whole), part.model.model.layers
        assert torch.equal(final_norm(part).weight, expected.weight)
        assert part.model.model.layers is layers
        check_teacher(Target.load(folder, tap_ids=TAPS, needs=Needs("layers", head=False)))
    folder = saved(tmp_path / "capped", tiny_model("gemma3", final_logit_softcapping=5.0))
    with pytest.raises(UserError, match="losses kl and lk cannot use it"):
        final_norm(Target.load(folder, tap_ids=TAPS, needs=TRAINS))


def test_a_teacher_whose_last_layer_is_not_what_its_norm_reads_is_refused(tmp_path):
    saved(tmp_path, tiny_model("llama"))
    config = config_of("ranks", loss=LossOptions(kind="lk"))
    target = load_target(config, str(tmp_path), [torch.device("cpu")], Needs("layers", head=False))
    norm = target.model.model.norm
    handle = norm.register_forward_pre_hook(lambda _, given: (2 * given[0],), prepend=True)
    with pytest.raises(UserError, match="losses kl and lk cannot use it"):
        check_teacher(target)
    handle.remove()
    check_teacher(target)


def test_only_the_needed_shards_of_a_hub_s_checkpoint_are_asked_for(tmp_path, monkeypatch):
    import huggingface_hub

    model, asked = tiny_model("qwen3"), []
    folder = saved(tmp_path / "snapshots" / "abc", model)
    truth = Target.load(folder, tap_ids=TAPS).features(packed()).features
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, allow_patterns, revision=None: (
            asked.append((name, revision, allow_patterns)) or str(folder)
        ),
    )
    for module in (tf.AutoConfig, tf.AutoTokenizer):
        known = module.from_pretrained
        monkeypatch.setattr(
            module, "from_pretrained", lambda name, *a, known=known, **k: known(folder, *a, **k)
        )
    cut = Target.load("some/model", tap_ids=TAPS, needs=CAPTURES)
    assert torch.equal(cut.features(packed()).features, truth)
    needed = {f for n, f in index.items() if not n.startswith(("model.layers.3.", "lm_head"))}
    assert asked == [
        ("some/model", None, ["*.json"]),
        ("some/model", "abc", sorted(needed)),
    ]
    assert cut.model.config._name_or_path == "some/model"
    assert needed < set(index.values())


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> tuple[Path, dict[str, int]]:
    """A checkpoint of some 180 MB, one shard a layer, and the bytes of its parts."""
    folder = tmp_path_factory.mktemp("large")
    config = tf.LlamaConfig(
        vocab_size=8000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=12,
        num_attention_heads=8,
        tie_word_embeddings=False,
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        empty = tf.LlamaForCausalLM(config).state_dict()
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, weight in empty.items():
        part = name.split(".")[2] if ".layers." in name else name.split(".")[-2]
        files.setdefault(part, {})[name] = torch.zeros(weight.shape)
    for part, weights in files.items():
        save_file(weights, folder / f"{part}.safetensors", {"format": "pt"})
    places = {name: f"{part}.safetensors" for part, ws in files.items() for name in ws}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder, {p: sum(w.nbytes for w in ws.values()) for p, ws in files.items()}


def status(name: str) -> int:
    """Bytes by /proc of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_load_takes_the_memory_of_what_is_needed(large, dtype):
    """Of its pages of the files (mapped, not copied) and of the weights where their dtype differs.

    A second copy of the whole, or of anything that is not needed, would be more.
    """
    folder, sizes = large
    for needs, parts in (
        (CAPTURES, ["embed_tokens", "0", "1", "2", "norm"]),
        (TRAINS, ["embed_tokens", "lm_head", "norm"]),
        (WHOLE, list(sizes)),
    ):
        needed = sum(sizes[part] for part in parts)
        release(torch.device("cpu"))  # what is let go meanwhile would hide what is taken
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here
        target = Target.load(folder, tap_ids=TAPS, dtype=dtype, needs=needs)
        for weight in target.model.parameters():
            weight.sum()  # a mapped page is read when it is first touched
        peak = status("VmHWM") - before
        expected = needed * (1 if dtype == "fp32" else 1.5)
        assert peak < expected + max(sizes.values()) + 8 * MIB
        del target
