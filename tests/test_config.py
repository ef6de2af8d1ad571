"""Options: recipes hold together, wrong values are errors, the command line reaches them."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from dflash_ext import train as train_module
from dflash_ext.config import (
    RECIPES,
    BatchOptions,
    DataOptions,
    DrafterOptions,
    EvalOptions,
    LossOptions,
    RunOptions,
    TopologyOptions,
    TrainConfig,
    to_json,
)
from dflash_ext.errors import UserError
from dflash_ext.train import main


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_hold_together(name):
    config = RECIPES[name]()
    batch, data = config.batch, config.data
    assert data.max_length <= batch.token_budget  # every prepared sample fits a batch
    assert data.train or data.max_prompt_tokens + data.max_answer_tokens < data.max_length
    assert batch.anchors_per_sequence <= batch.anchor_budget
    assert data.train or data.held_out < data.synthetic_rows
    content = json.loads(to_json(config))
    assert content["batch"] == dataclasses.asdict(batch)
    assert content["steps"] == config.steps


@pytest.mark.parametrize(
    ("owner", "options", "message"),
    [
        (LossOptions, {"gamma": "0"}, "gamma 0.0"),
        (LossOptions, {"gamma": "-2"}, "gamma -2.0"),
        (LossOptions, {"gamma": "nan"}, "gamma nan"),
        (LossOptions, {"gamma": "x"}, "gamma 'x'"),
        (LossOptions, {"alpha": 1.5}, "alpha 1.5"),
        (LossOptions, {"alpha": math.nan}, "alpha nan"),
        (LossOptions, {"chunk_rows": 0}, "chunk_rows 0"),
        (DrafterOptions, {"block_size": 10}, "block_size 10"),
        (DrafterOptions, {"num_layers": 0}, "num_layers 0"),
        (DataOptions, {"max_length": 1}, "max_length 1"),
        (BatchOptions, {"draws": 0}, "draws 0"),
        (BatchOptions, {"accumulate": 0}, "accumulate 0"),
        (EvalOptions, {"max_new_tokens": 0}, "max_new_tokens 0"),
        (RunOptions, {"keep_checkpoints": 0}, "keep_checkpoints 0"),
        (TrainConfig, {"steps": 0}, "steps 0"),
        (TrainConfig, {"epochs": 0}, "epochs 0"),
        (BatchOptions, {"anchor_chunk": 0}, "anchor_chunk 0"),
        (TopologyOptions, {"targets": 5}, "--targets 5 and --drafters None: give both"),
        (TopologyOptions, {"drafters": 1}, "give both, or neither"),
        (TopologyOptions, {"targets": 0, "drafters": 1}, "targets 0"),
        (TopologyOptions, {"targets": 1, "drafters": 0}, "drafters 0"),
        (TopologyOptions, {"targets": "auto", "drafters": 1}, "leave --drafters out"),
        (TopologyOptions, {"targets": 1, "drafters": 1, "devices": 3}, "for --targets auto only"),
        (TopologyOptions, {"buffers": 1}, "buffers 1"),
        (TopologyOptions, {"stall_seconds": 0}, "stall_seconds 0"),
        (TrainConfig, {"seed": -1}, "seed -1"),
    ],
)
def test_wrong_values_are_user_errors(owner, options, message):
    with pytest.raises(UserError, match=message):
        owner(**options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": BatchOptions(anchors_per_sequence=200)}, "anchors_per_sequence 200 exceeds"),
        ({"data": DataOptions(synthetic_rows=30, held_out=30)}, "held_out 30 of synthetic_rows 30"),
        ({"data": DataOptions(train="x", max_length=4096)}, "max_length 4096 exceeds token_budget"),
        ({"data": DataOptions(validation="x")}, "validation x is of no use without train"),
        ({"data": DataOptions(max_answer_tokens=2000)}, "max_answer_tokens 2064 exceeds"),
        ({"topology": TopologyOptions(shard=True)}, "--shard is for AdamW"),
    ],
)
def test_options_that_contradict_each_other(changes, message):
    with pytest.raises(UserError, match=message):
        TrainConfig(**changes)


def test_options_of_the_other_kind_of_data_do_not_matter():
    TrainConfig(data=DataOptions(max_length=4096))
    TrainConfig(data=DataOptions(train="x", held_out=1000, max_answer_tokens=2000))


@pytest.mark.parametrize("recipe", ["cpu", "one_gpu"])
def test_an_export_s_shape_wins_over_the_recipe_s_but_not_over_the_user_s(recipe, monkeypatch):
    seen = []
    monkeypatch.setattr(train_module, "train", lambda config: seen.append(config.drafter) or 0)
    main([recipe])
    main([recipe, "--drafter.init", "some/export"])
    main([recipe, "--init-from", "some/export", "--drafter.num-layers", "3"])
    assert [d.num_layers for d in seen] == [RECIPES[recipe]().drafter.num_layers, None, 3]
    assert [d.block_size for d in seen] == [RECIPES[recipe]().drafter.block_size, None, None]


def test_the_headline_recipe_and_what_it_leaves_to_its_user(monkeypatch):
    config = RECIPES["eight_gpu"]()
    batch = config.batch
    assert (config.topology.targets, config.topology.drafters) == (5, 3)
    assert (batch.token_budget, batch.max_documents) == (49152, 64)
    assert (config.loss.gamma, config.drafter.block_size) == ("10", 16)
    assert batch.anchors_per_sequence == 512
    assert batch.anchor_budget >= batch.max_documents * 512  # no document gets fewer
    with pytest.raises(UserError, match=r"needs --target.path, --data.train, --run.dir: give"):
        main(["eight_gpu"])
    own = ["--target.path", "t", "--data.train", "d.jsonl"]
    with pytest.raises(UserError, match=r"needs --run.dir: give"):
        main(["eight_gpu", *own])
    started = []
    monkeypatch.setattr(train_module, "start_local", lambda c, size: started.append((c, size)) or 0)
    assert main(["eight_gpu", *own, "--run.dir", "runs/mine"]) == 0
    assert main(["eight_gpu", *own, "--run.dir", "r", "--targets", "7", "--drafters", "1"]) == 0
    auto = ["--targets", "auto", "--drafters", "None", "--devices", "6"]
    assert main(["eight_gpu", *own, "--run.dir", "r", *auto]) == 0
    assert [size for _, size in started] == [8, 8, 6]
    assert started[0][0].run.dir == Path("runs/mine")


def test_json_of_paths():
    config = TrainConfig(run=RunOptions(dir=Path("a/b")))
    assert json.loads(to_json(config))["run"]["dir"] == "a/b"


def test_command_line(capsys):
    with pytest.raises(UserError, match=r"^gamma 0\.0 is not a finite"):
        main(["cpu", "--loss.gamma", "0"])
    assert capsys.readouterr().err == ""
    with pytest.raises(SystemExit) as stop:
        main(["one_gpu", "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "--batch.token-budget" in shown
    assert str(RECIPES["one_gpu"]().batch.token_budget) in shown
    with pytest.raises(UserError, match=r"torch sees no GPU|is unknown"):
        main(["cpu", "--device", "gpu0"])
