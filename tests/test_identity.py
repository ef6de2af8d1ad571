"""What a run trains on stays what it was, or grows: decided once, the same on every rank."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import make_world, records, resumed, run_config, start
from tiny_targets import one_thread, tiny_model  # noqa: F401

from dflash_ext.checkpoint import Progress, checkpoints
from dflash_ext.data.store import StoreWriter, TokenStore
from dflash_ext.errors import UserError
from dflash_ext.identity import settle
from dflash_ext.monitor import Monitor
from dflash_ext.plan import plan_epoch
from dflash_ext.ranks import Ranks
from dflash_ext.samples import Samples, split
from dflash_ext.topology import Course, Topology
from dflash_ext.train import train
from dflash_ext.uses import Uses
from dflash_ext.watch import INTERRUPTED, NoWatch

HELD = 6


def extend(store: Path, rows: range, *, length: int = 9) -> TokenStore:
    """Write a store, or new rows behind those of a store; rows of one number are of one content."""
    with StoreWriter(store, extend=True) as writer:
        for row in rows:
            writer.append([5, *range(6 + row, 5 + row + length)], [True] * length)
    return TokenStore.open(store)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


class Told(NoWatch):
    """Rank 0 has said something."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def wait_for(self, key, activity):
        return self.value


class Run:
    """A run's folder, its data and where it stands, without a model that trains."""

    def __init__(self, folder: Path, model) -> None:
        self.folder, self.store = folder, folder / "store"
        self.target = SimpleNamespace(model=model)
        self.config = run_config(folder, folder)
        self.validation: TokenStore | None = None
        extend(self.store, range(40))

    def settle(self, batches: int | None = None, *, told=None):
        """What a run finds that starts, or goes on after some batches; what it said."""
        checkpoint = None
        if batches is not None:
            checkpoint = self.folder / "step-1"
            checkpoint.mkdir(exist_ok=True)
            done = dataclasses.asdict(Progress(batches, 0.0, Course(1, 1, 1)))
            (checkpoint / "progress.json").write_text(json.dumps(done))
        ranks = Ranks()
        if told is not None:
            ranks = Ranks(Topology(2, 1, shared=False), rank=2, watch=Told(told))
        store, stream = TokenStore.open(self.store), io.StringIO()
        data = split(store, HELD, self.config.seed)
        if self.validation is not None:
            other = self.validation
            data = (Samples(store, np.arange(len(store))), Samples(other, np.arange(len(other))))
        monitor = Monitor(None, stream=stream)
        args = (self.config, ranks, self.folder, checkpoint, self.target, data, monitor)
        return *settle(*args), stream.getvalue()

    @property
    def grown(self) -> list:
        return json.loads((self.folder / "identity.json").read_text())["grown"]


@pytest.fixture
def run(tmp_path, model):
    return Run(tmp_path, model)


def test_a_run_goes_on_with_what_it_began_on(run):
    train_set, held, schedule, said = run.settle()
    again = run.settle(5)
    assert (said, again[3], run.grown) == ("", "", [])
    assert np.array_equal(again[0].indices, train_set.indices)
    assert np.array_equal(again[1].indices, held.indices)
    assert again[2].batch(9) == schedule.batch(9)


@pytest.mark.parametrize("boundary", [False, True])
def test_data_grow_from_the_next_epoch_on(run, boundary):
    before, held, first, _ = run.settle()
    epoch = 2  # the one in progress, or the next one
    done = first.batches_of(epoch) + (0 if boundary else 1)
    last = epoch if boundary else epoch + 1
    longer = extend(run.store, range(35, 60))  # five copies in front, held-out ones among them?
    now, still_held, schedule, said = run.settle(done)
    assert np.array_equal(still_held.indices, held.indices)
    held_keys = set(longer.keys[held.indices].tolist())
    expected = [i for i in range(len(longer)) if int(longer.keys[i]) not in held_keys]
    assert now.indices.tolist() == expected
    assert expected[: len(before.indices)] == before.indices.tolist()
    text = f"the data grew from 34 to {len(expected)} samples: epochs from {last} on"
    assert said.strip() == f"{text} (counted from 0) use all of them"
    assert run.grown == [[last, longer.identity]]
    assert [schedule.samples_in(e) for e in range(last + 2)] == [34] * last + [len(expected)] * 2
    for step in range(first.batches_of(last)):
        assert schedule.batch(step) == first.batch(step)
    # Killed and started again, before or after the switch: the same plan, nothing new to say.
    for batches in (done, 0, done + 100):
        again = run.settle(batches)
        assert (again[3], run.grown) == ("", [[last, longer.identity]])
        assert [again[2].batch(s) for s in range(60)] == [schedule.batch(s) for s in range(60)]


def test_data_grow_again(run):
    _, _, first, _ = run.settle()
    one = extend(run.store, range(40, 50))
    assert "from 34 to 44" in run.settle(first.batches_of(1) + 1)[3]
    assert run.grown == [[2, one.identity]]
    two = extend(run.store, range(50, 53))  # before epoch 2, which then uses the latest state
    assert "from 44 to 47" in run.settle(first.batches_of(1) + 2)[3]
    assert run.grown == [[2, two.identity]]
    schedule = run.settle(first.batches_of(1) + 2)[2]
    three = extend(run.store, range(53, 60))
    _, _, third, _ = run.settle(schedule.batches_of(3) + 1)
    assert run.grown == [[2, two.identity], [4, three.identity]]
    assert [third.samples_in(epoch) for epoch in range(6)] == [34, 34, 47, 47, 54, 54]
    # An older checkpoint, say of a run whose later ones were lost, replays the plan as it is.
    assert run.settle(1)[2].samples_in(3) == 47
    run.config = dataclasses.replace(run.config, epochs=5)
    extend(run.store, range(60, 62))
    said = run.settle(third.batches_of(4) + 1)[3]
    assert said.strip().endswith(
        "epochs from 5 on (counted from 0) use all of them, this run ends before"
    )


def test_other_ranks_do_what_rank_0_says(run):
    run.settle()
    extend(run.store, range(40, 50))
    first = run.settle(3)
    told = json.loads((run.folder / "identity.json").read_text())
    extend(run.store, range(50, 60))  # goes on while the ranks open the store
    other = run.settle(told=told)
    for mine, theirs in zip(first[:2], other[:2]):
        assert np.array_equal(mine.indices, theirs.indices)
        assert mine.store.identity == theirs.store.identity
    assert [first[2].batch(s) for s in range(40)] == [other[2].batch(s) for s in range(40)]
    layers = [name for name in told["weights"] if name.startswith("model.layers.")]
    assert sorted(layers) == [f"model.layers.{i}" for i in range(4)]
    for name in ("training data", "held-out data", "target's weights"):
        changed = told | {"began": told["began"] | {name: "other"}, "grown": []}
        if name == "target's weights":
            changed = told | {"weights": told["weights"] | {layers[1]: "other"}}
        with pytest.raises(UserError, match=f"the {name} on rank 2 differs from rank 0's"):
            run.settle(told=changed)
    with pytest.raises(UserError, match="the training data on rank 2 differs"):
        run.settle(told=told | {"grown": [[1, "not here"]]})


def test_a_version_that_plans_otherwise_goes_on_with_no_run(run):
    """Its batches would be others: samples used twice, and others not at all."""
    run.settle()
    file = run.folder / "identity.json"
    told = json.loads(file.read_text())
    told["began"].pop("planner of batches in this version of dflash_ext")
    file.write_text(json.dumps(told))
    with pytest.raises(UserError, match="the planner of batches in this version of dflash_ext cha"):
        run.settle(3)


def test_data_of_validation_stay_as_they_were(run, tmp_path):
    run.validation = extend(tmp_path / "other", range(100, 104))
    run.settle()
    run.validation = extend(tmp_path / "other", range(104, 110))
    train_set, held, _, said = run.settle(3)
    assert (len(train_set.indices), held.indices.tolist(), said) == (40, [0, 1, 2, 3], "")
    assert (len(held.store), run.grown) == (4, [])


def test_other_data_are_refused(run, tmp_path):
    run.settle()
    before = (tmp_path / "identity.json").read_text()
    shutil.copytree(run.store, tmp_path / "kept")
    extend(run.store, range(40, 42), length=121)
    with pytest.raises(UserError, match="sample 34 has 121 tokens but a batch holds 120"):
        run.settle(3)
    assert (tmp_path / "identity.json").read_text() == before  # the run may go on without them
    for rows in (range(39), range(1, 50)):
        shutil.rmtree(run.store)
        extend(run.store, rows)
        with pytest.raises(UserError, match="the training data changed since the run in"):
            run.settle(3)
    shutil.rmtree(run.store)
    shutil.move(tmp_path / "kept", run.store)
    assert run.settle(3)[3] == ""
    run.target = SimpleNamespace(model=tiny_model("llama", seed=5))
    with pytest.raises(UserError, match="the target's weights changed since the run in"):
        run.settle(3)
    (tmp_path / "identity.json").write_text('{"training data": "a"}')
    with pytest.raises(UserError, match="is damaged or of another version"):
        run.settle(3)
    (tmp_path / "identity.json").unlink()
    with pytest.raises(UserError, match="is missing"):
        run.settle(3)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 30), min_size=2, max_size=40), st.integers(0, 5), st.data())
def test_the_split_of_a_growing_store(keys, seed, data):
    """Held out is what was at the start, and no copy of it is trained on; old places stay."""
    begun = data.draw(st.integers(1, len(keys)))
    held_out = data.draw(st.integers(0, len(set(keys[:begun])) - 1))
    store, former = (
        SimpleNamespace(keys=np.array(part, dtype=np.uint64)) for part in (keys, keys[:begun])
    )
    then = [part.indices.tolist() for part in split(former, held_out, seed)]
    now = [part.indices.tolist() for part in split(store, held_out, seed, begun=begun)]
    held = {keys[i] for i in then[1]}
    assert now[1] == then[1]
    assert now[0] == then[0] + [i for i in range(begun, len(keys)) if keys[i] not in held]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        root = make_world(tmp_path_factory.mktemp("world"))
        patch.setenv("DFLASH_CACHE", str(root / "cache"))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield root


@pytest.fixture
def stop_at(monkeypatch):
    """A run of this process is interrupted after the step in here."""
    steps, log = [0], Monitor.log

    def interrupting(self, kind, step, metrics):
        log(self, kind, step, metrics)
        if (kind, step) == ("train", steps[0]):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Monitor, "log", interrupting)
    return steps


def test_a_run_continues_on_an_extended_store(world, tmp_path, monkeypatch, stop_at, capsys):
    """Stopped and extended twice; old epochs to the bit those of a run that nobody disturbed."""
    batches: list[list[int]] = []
    use = Uses.use

    def noting(self, sample_ids):
        batches.append(list(sample_ids))
        use(self, sample_ids)

    monkeypatch.setattr(Uses, "use", noting)
    shutil.copytree(world / "store", tmp_path / "store")
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    steps = 36

    def config(folder):
        found = run_config(world, folder, steps=steps)
        return dataclasses.replace(
            found, data=dataclasses.replace(found.data, train=str(tmp_path / "store"))
        )

    assert train(config(whole)) == 0
    undisturbed, batches[:] = list(batches), []
    store = TokenStore.open(tmp_path / "store")
    trained, held = (part.indices for part in split(store, HELD, 0))

    def planned(indices, store, epoch):
        anchors = np.minimum(store.candidates[indices], 4)
        found = plan_epoch(
            store.lengths[indices], anchors, seed=0, epoch=epoch,
            token_budget=120, max_documents=6, anchor_budget=24,
        )  # fmt: skip
        return [indices[group].tolist() for group in found]

    expected = [*planned(trained, store, 0), *planned(trained, store, 1)]
    old = len(expected)
    stop_at[0] = old - 2
    assert train(config(pieces)) == INTERRUPTED
    with StoreWriter(tmp_path / "store", extend=True) as writer:
        ids, mask = store.sample(int(held[0]))
        writer.append(ids.tolist(), mask.tolist())  # a copy of a held-out row
        for i in range(11):
            writer.append([5, *range(20 + i, 30 + i)], [j > 2 for j in range(11)])
    longer = TokenStore.open(tmp_path / "store")
    more = np.array([*trained, *range(len(store) + 1, len(longer))])
    expected += planned(more, longer, 2)
    stop_at[0] = len(expected) - 1
    assert train(resumed(config(pieces))) == INTERRUPTED
    said = f"the data grew from {len(trained)} to {len(more)} samples: epochs from 2 on"
    assert said in capsys.readouterr().out
    longest = extend(tmp_path / "store", range(7))
    most = np.array([*more, *range(len(longer), len(longest))])
    expected += [*planned(most, longest, 3), *planned(most, longest, 4)]
    stop_at[0] = 0
    assert train(resumed(config(pieces))) == 0

    assert len(expected) > steps > len(expected) - len(planned(most, longest, 4))
    assert batches == expected[:steps]
    assert undisturbed[:old] == expected[:old]
    for x, y in zip(records(whole)[:old], records(pieces)):
        assert (x["loss"], x["grad_norm"]) == (y["loss"], y["grad_norm"])
    last = checkpoints(pieces / "checkpoints")[-1]
    uses = torch.load(last / "optimizer.pt", weights_only=True)["uses"]
    counts = np.bincount(np.concatenate(batches), minlength=len(longest))
    assert uses.tolist() == counts[most].tolist()
    assert counts.sum() == uses.sum()  # nothing else was trained on
    for x, y in zip(records(whole, "validation"), records(pieces, "validation"), strict=True):
        assert x["blocks"] == y["blocks"]  # of the same held-out rows


def test_ranks_continue_on_an_extended_store(world, tmp_path, stop_at):
    """A run given in epochs gets longer; it also becomes one of two drafters and a target."""
    shutil.copytree(world / "store", tmp_path / "store")
    folder = tmp_path / "run"

    def config(targets, drafters, accumulate):
        batch = {"token_budget": 48, "draws": 2, "accumulate": accumulate}
        found = run_config(world, folder, targets, drafters, epochs=3, batch=batch)
        data = dataclasses.replace(found.data, train=str(tmp_path / "store"))
        return dataclasses.replace(found, data=data)

    stop_at[0] = 3
    assert train(config(0, 0, 2)) == INTERRUPTED
    stop_at[0] = 0
    extend(tmp_path / "store", range(12))
    assert start(resumed(config(1, 2, 1))) == 0
    [(epoch, identity)] = json.loads((folder / "identity.json").read_text())["grown"]
    assert identity == TokenStore.open(tmp_path / "store").identity
    assert epoch == 1
    last = checkpoints(folder / "checkpoints")[-1]
    uses = torch.load(last / "optimizer.pt", weights_only=True)["uses"]
    old = len(split(TokenStore.open(world / "store"), HELD, 0)[0].indices)
    assert uses.tolist() == [3] * old + [2] * 12
