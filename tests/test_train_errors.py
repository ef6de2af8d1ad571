"""Whole runs that go wrong: early, saying why, and without losing what was trained."""

# ruff: noqa: F811  (fixtures of another file)
from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch
from test_train import config_of, resumed, world  # noqa: F401
from tiny_targets import one_thread, tiny_model, tiny_tokenizer  # noqa: F401

from dflash_ext import judge as judge_module
from dflash_ext import samples as samples_module
from dflash_ext import train as train_module
from dflash_ext.checkpoint import checkpoints
from dflash_ext.comparison import Comparison, encoded_prompts, short_names
from dflash_ext.config import DataOptions, DrafterOptions, EvalOptions, TargetOptions
from dflash_ext.data.store import StoreWriter, TokenStore
from dflash_ext.errors import UserError
from dflash_ext.ops.kept import least_ds
from dflash_ext.optim import DrafterOptimizer
from dflash_ext.samples import split
from dflash_ext.target import Target
from dflash_ext.train import train
from dflash_ext.trainer import Trainer

OWN_DATA = DataOptions(
    synthetic_rows=8, held_out=2, max_prompt_tokens=16, max_answer_tokens=32, synthesis_batch=77
)


def refuse(*args, **kwargs):
    raise AssertionError("this must not be reached")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval": EvalOptions(prompts=("nowhere.txt",))}, "no prompt set or file 'nowhere.txt'"),
        ({"drafter": DrafterOptions(num_layers=9)}, "the target only 4"),
        ({"drafter": DrafterOptions(init="/nowhere")}, "/nowhere"),
        ({"target.mask_token_id": 10_000}, "mask_token_id 10000 is no row"),
    ],
)
def test_mistakes_are_found_before_the_target_writes_data(
    world,
    tmp_path,
    monkeypatch,
    changes,
    message,
):
    monkeypatch.setattr(train_module, "synthesise", refuse)
    config = config_of(world, tmp_path / "run", data=OWN_DATA)
    if "target.mask_token_id" in changes:
        changes = {"target": dataclasses.replace(config.target, mask_token_id=10_000)}
    with pytest.raises(UserError, match=message):
        train(dataclasses.replace(config, **changes))


def test_a_sample_beyond_the_budget_is_found_before_any_decoding(
    world,
    tmp_path,
    monkeypatch,
):
    with StoreWriter(tmp_path / "store") as writer:
        for length in (9, 200, 9):
            writer.append(list(range(3, 12)) * (length // 9 + 1), [True] * 9 * (length // 9 + 1))
    store = TokenStore.open(tmp_path / "store")
    monkeypatch.setattr(train_module, "synthesise", lambda *args: split(store, 0, 0))
    monkeypatch.setattr(Comparison, "baselines", refuse)
    prompts = EvalOptions(prompts=(str(world / "prompts.txt"),), prompts_per_set=1)
    data = dataclasses.replace(OWN_DATA, held_out=0)
    with pytest.raises(UserError, match="tokens but a batch holds 120"):
        train(config_of(world, tmp_path / "run", data=data, eval=prompts))


def test_synthesis_out_of_memory_names_its_option(world, tmp_path, monkeypatch):
    def too_large(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(samples_module, "synthesized_store", too_large)
    with pytest.raises(UserError, match=r"77 conversations .* lower --data.synthesis-batch"):
        train(config_of(world, tmp_path / "run", data=OWN_DATA))


def test_the_rehearsal_has_moments_and_gradients_and_evaluation_is_named(
    world,
    tmp_path,
    monkeypatch,
    capsys,
):
    kept: list[DrafterOptimizer] = []
    init, micro_step = DrafterOptimizer.__init__, Trainer.micro_step

    class Rehearsed(BaseException):
        pass

    def keeping(self, *args):
        init(self, *args)
        kept.append(self)

    def looking(self, *args):
        assert all(p.grad is not None for p in self.drafter.parameters())
        held = [p for o in kept[0].optimizers for p in o.state]
        assert {id(p) for p in held} == {id(p) for p in self.drafter.parameters()}
        assert least_ds() > 1e5  # the backward takes what dS of long documents would need
        micro_step(self, *args)
        raise Rehearsed

    monkeypatch.setattr(DrafterOptimizer, "__init__", keeping)
    monkeypatch.setattr(Trainer, "micro_step", looking)
    config = config_of(
        world,
        tmp_path / "run",
        target=TargetOptions(path=str(world / "target"), tap_ids=(0, 2), dtype="bf16"),
        eval=EvalOptions(prompts=(str(world / "prompts.txt"),), prompts_per_set=1),
    )
    with pytest.raises(Rehearsed):
        train(config)
    assert "more for the whole target in fp32" in capsys.readouterr().out


def test_a_run_that_stops_for_non_finite_steps_is_saved(
    world,
    tmp_path,
    monkeypatch,
):
    calls, micro_step = [], Trainer.micro_step

    def poisoned(self, *args):
        sums = micro_step(self, *args)
        calls.append(sums)
        if len(calls) > 1 + 4:  # the rehearsal and four good steps
            self.drafter.fc.weight.grad[0, 0] = float("nan")
        return sums

    monkeypatch.setattr(Trainer, "micro_step", poisoned)
    config = config_of(world, tmp_path / "run")
    config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, max_nonfinite=3))
    with pytest.raises(UserError, match=r"gradient of fc.weight was not finite in 3 steps"):
        train(config)
    last = checkpoints(tmp_path / "run/checkpoints")[-1]
    assert last.name == "step-7"
    state = torch.load(last / "optimizer.pt", weights_only=True)["optimizer"]
    assert (state["counters"]["steps"], state["counters"]["skipped_nonfinite"]) == (4, 3)


@pytest.mark.parametrize("edited", ["data", "target"])
def test_a_run_does_not_continue_on_other_data_or_weights(world, tmp_path, edited):
    target, chat = shutil.copytree(world / "target", tmp_path / "target"), tmp_path / "chat.jsonl"
    shutil.copy(world / "chat.jsonl", chat)
    config = config_of(world, tmp_path / "run", steps=2)
    config = dataclasses.replace(
        config,
        target=dataclasses.replace(config.target, path=str(target)),
        data=dataclasses.replace(config.data, train=str(chat)),
    )
    assert train(config) == 0
    assert train(resumed(config)) == 0  # a copy or a touch is no change
    if edited == "data":
        chat.write_text(chat.read_text().replace("w7 ", "w8 "))
    else:
        tiny_model("llama", head_dim=64, seed=5).save_pretrained(target)
    what = "training data" if edited == "data" else "target's weights"
    with pytest.raises(UserError, match=f"the {what} changed since the run in"):
        train(resumed(config))


def test_prompt_files_of_one_name_are_two_sets(world, tmp_path):
    files = [tmp_path / folder / "eval.txt" for folder in "ab"]
    for file, text in zip(files, ("w1 w2", "w5 w6")):
        file.parent.mkdir()
        file.write_text(text + "\n")
    names = tuple(map(str, files))
    target = Target.load(world / "target", tap_ids=(0, 2))
    sets = encoded_prompts(target, names, 1)
    assert tuple(sets) == names
    assert sets[names[0]] != sets[names[1]]
    assert short_names([*names, "x/other.txt", "gsm8k"]) == {
        **{name: name for name in names},
        "x/other.txt": "other.txt",
        "gsm8k": "gsm8k",
    }


def test_the_table_is_shown_even_if_results_cannot_be_saved(
    world,
    tmp_path,
    monkeypatch,
    capsys,
):
    def full(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(judge_module, "save", full)
    prompts = EvalOptions(
        prompts=(str(world / "prompts.txt"),), prompts_per_set=1, max_new_tokens=4, every=0
    )
    with pytest.raises(OSError, match="No space"):
        train(config_of(world, tmp_path / "run", eval=prompts, steps=1))
    assert "Accepted length" in capsys.readouterr().out
