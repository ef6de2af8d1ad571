"""One target over several devices: its layers, its ranks' devices, and what it is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers as tf
from test_target import packed
from test_target_loading import config_of, saved
from tiny_targets import one_thread, tiny_model  # noqa: F401

from dflash_ext.config import EvalOptions, TargetOptions, TopologyOptions, TrainConfig
from dflash_ext.errors import UserError
from dflash_ext.launch import world_size
from dflash_ext.ranks import Ranks, device_of, target_devices
from dflash_ext.rates import Tally, rates
from dflash_ext.reader import open_reader
from dflash_ext.target import Target
from dflash_ext.target_loading import WHOLE, Needs, Shape
from dflash_ext.topology import Topology


def test_layers_are_spread_evenly_over_the_devices(tmp_path):
    saved(tmp_path, tiny_model("gemma3", num_hidden_layers=4))
    shape = Shape.read(str(tmp_path), trust_remote_code=False)
    one, two, three = (torch.device("cuda", i) for i in range(3))
    assert shape.device_map([two]) == {"": two}
    found = shape.device_map([one, two, three])
    layers = [found.pop(f"model.layers.{i}") for i in range(4)]
    assert layers == [one, one, two, three]
    assert set(found.values()) == {one}
    assert {"model.embed_tokens", "model.norm", "lm_head"} <= set(found)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma3"])
def test_a_target_over_two_devices_is_the_same_target(family, tmp_path, monkeypatch):
    """Under two names of the CPU: the hooks that move what passes between devices are real."""
    # A tensor never says which of them it is on.
    monkeypatch.setattr("accelerate.utils.modeling.check_device_same", lambda a, b: True)
    model = tiny_model(family, tie_word_embeddings=False)
    folder, batch = saved(tmp_path, model), packed()
    whole = Target.load(folder, tap_ids=(1, 3))
    devices = [torch.device("cpu", 0), torch.device("cpu", 1)]
    for needs, last in ((WHOLE, 3), (Needs("taps", head=False), 3)):
        target = Target.load(folder, tap_ids=(1, last), device=devices, needs=needs)
        layers = target.model.model.layers
        runs_on = [layer._hf_hook.execution_device for layer in layers]
        assert runs_on == [devices[0], devices[0], devices[1], devices[1]]
        assert torch.equal(target.features(batch).features, whole.features(batch).features)
    target = Target.load(folder, tap_ids=(1, 3), device=devices)
    ids, places = torch.tensor([[3, 4, 5]]), torch.arange(3)[None]
    with pytest.raises(UserError, match="spread over 2 devices, where it gives features only"):
        open_reader(target, 1, 8)
    got, expected = (t.forward_with_taps(ids, places, tf.DynamicCache()) for t in (target, whole))
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine, theirs)


def split_config(devices: int = 2, **changes) -> TrainConfig:
    return config_of("ranks", target=TargetOptions(devices=devices), device="cuda", **changes)


@pytest.fixture
def gpus(monkeypatch):
    """torch sees as many GPUs as are set here."""

    def see(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    see(6)
    return see


def test_each_target_has_its_own_gpus(gpus):
    config = split_config()  # of two targets and two drafters
    assert world_size(config) == 4
    found = [device_of(config, rank, rank, 4) for rank in range(4)]
    assert found == [(torch.device("cuda", i), True) for i in (0, 1, 2, 4)]
    topology = Topology(2, 2, shared=False)
    spread = [
        [d.index for d in target_devices(config, Ranks(topology, rank, device))]
        for rank, (device, _) in enumerate(found)
    ]
    assert spread == [[0], [1], [2, 3], [4, 5]]
    alone = dataclasses.replace(config, topology=TopologyOptions())
    assert world_size(alone) == 1
    assert len(target_devices(alone, Ranks(device=torch.device("cuda", 0)))) == 2


def test_ranks_of_one_device_each_share_them_as_before(gpus):
    gpus(3)
    config = split_config(1)
    found = [device_of(config, rank, rank, 4) for rank in range(4)]
    assert found == [(torch.device("cuda", i), False) for i in (0, 1, 2, 0)]
    cpu = dataclasses.replace(config, device="cpu")
    assert device_of(cpu, 2, 2, 4) == (torch.device("cpu"), False)


@pytest.mark.parametrize("count", [0, 5])
def test_too_few_gpus_are_an_error_at_once(gpus, count):
    gpus(count)
    config = dataclasses.replace(split_config(), device="auto")
    for use in (lambda: world_size(config), lambda: device_of(config, 3, 3, 4)):
        with pytest.raises(UserError, match=f"need 6 GPUs of their own, there are {count}") as e:
            use()
        assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"data": TrainConfig().data}, "cannot write its own data: give --data.train"),
        ({"eval": EvalOptions(prompts_per_set=1)}, "cannot decode: add --eval.prompts-per-set 0"),
        ({"topology": TopologyOptions("auto")}, "cannot be timed by --targets auto"),
    ],
)
def test_what_a_split_target_is_not_for(changes, match):
    with pytest.raises(UserError, match=match) as error:
        split_config(**changes)
    assert "\n" not in str(error.value)


def test_at_least_one_device():
    with pytest.raises(UserError, match="devices 0 must be"):
        TargetOptions(devices=0)


def test_utilisation_is_of_all_its_devices():
    tally, topology = Tally(target_tera=12.0), Topology(2, 1, shared=False)
    one, three = (rates(tally, 1.0, topology, 2.0, devices) for devices in (1, 3))
    assert (one["mfu_target"], three["mfu_target"]) == (3.0, 1.0)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma3"])
def test_features_of_two_gpus_are_on_the_first(family, tmp_path):
    folder, batch = saved(tmp_path, tiny_model(family, head_dim=64)), packed()
    first, second = (torch.device("cuda", i) for i in range(2))
    whole = Target.load(folder, device=first, dtype="bf16", tap_ids=(1, 3))
    target = Target.load(folder, device=[first, second], dtype="bf16", tap_ids=(1, 3))
    places = [next(layer.parameters()).device for layer in target.model.model.layers]
    assert places == [first, first, second, second]
    got = target.features(batch).features
    assert got.device == first
    truth = Target.load(folder, tap_ids=(1, 3)).features(batch).features
    ours, theirs = got.float().cpu(), whole.features(batch).features.float().cpu()
    assert (ours - truth).norm() <= 2 * (theirs - truth).norm() + 1e-3 * truth.norm()
    assert {matrix.device for matrix in target.vocabulary()} == {first}
