"""Optimizer steps: fp32 moments, exact splits, schedules, and the steps that change nothing."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from test_drafter import make

from dflash_ext.checkpoint import Progress, load_checkpoint, save_checkpoint
from dflash_ext.config import OptimOptions
from dflash_ext.errors import UserError
from dflash_ext.muon import Muon
from dflash_ext.optim import DrafterOptimizer, lr_factor

CONSTANT = {"schedule": "wsd", "warmup_fraction": 0.0, "decay_fraction": 0.0, "clip": 0.0}
NAMES = ["adamw", "muon"]
ONE = torch.tensor([1.0, 1.0])  # loss numerator and weight


def fill_gradients(drafter, value=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for p in drafter.parameters():
        p.grad = (
            torch.full_like(p, value)
            if value is not None
            else torch.randn(p.shape, generator=generator)
        )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("resume", [False, True])
def test_norm_weight_reads_0_94_after_100_steps(tmp_path, name, resume):
    """Requirement 10: bf16 masters or moments would not move by 6e-4 at 1.0."""
    options = OptimOptions(name=name, lr=6e-4, vector_lr=6e-4, **CONSTANT)

    def fresh():
        drafter = make()
        drafter.norm.weight.data.fill_(1.0)
        return drafter, DrafterOptimizer(drafter, options, 100)

    drafter, optimizer = fresh()
    for step in range(100):
        if resume and step == 50:
            path = save_checkpoint(tmp_path, drafter, optimizer, Progress(50), keep=1)
            drafter, optimizer = fresh()
            assert load_checkpoint(path, drafter, optimizer)[0] == Progress(50)
        for p in drafter.parameters():
            p.grad = torch.zeros_like(p)
        drafter.norm.weight.grad.fill_(0.01)
        result, _ = optimizer.step(ONE)
        assert result.applied
    assert drafter.norm.weight.tolist() == pytest.approx([0.94] * 48, abs=1e-3)
    for inner in optimizer.optimizers:
        for state in inner.state.values():
            assert all(x.dtype == torch.float32 for x in state.values())


def test_adamw_step_equals_torch_with_clipping_and_division():
    options = OptimOptions(name="adamw", lr=1e-2, vector_lr=1e-3, weight_decay=0.1, clip=0.5)
    drafter, peer = make(), make()
    optimizer = DrafterOptimizer(drafter, options, total_steps=10)
    norms = [p for p in peer.parameters() if p.dim() == 1]
    matrices = [p for p in peer.parameters() if p.dim() == 2]
    reference = torch.optim.AdamW(
        [
            {"params": norms, "lr": 1e-3, "weight_decay": 0.0},
            {"params": matrices, "lr": 1e-2, "weight_decay": 0.1},
        ],
        betas=options.betas,
    )
    for step in range(4):
        fill_gradients(drafter, seed=step)
        fill_gradients(peer, seed=step)
        result, _ = optimizer.step(torch.tensor([3.0, 8.0]))
        for p in peer.parameters():
            p.grad /= 8.0
        norm = torch.nn.utils.clip_grad_norm_(peer.parameters(), 0.5)
        for group, peak in zip(reference.param_groups, (1e-3, 1e-2)):
            group["lr"] = peak * lr_factor(step, 10, options)
        reference.step()
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
    for a, b in zip(drafter.parameters(), peer.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_muon_takes_matrices_and_adamw_the_rest():
    drafter = make(attention_bias=True)
    optimizer = DrafterOptimizer(drafter, OptimOptions(name="muon", weight_decay=0.1), 10)
    muon, adamw = optimizer.optimizers
    assert isinstance(muon, Muon)
    grouped = [[p for g in o.param_groups for p in g["params"]] for o in (muon, adamw)]
    assert all(p.dim() == 2 for p in grouped[0])
    assert all(p.dim() == 1 for p in grouped[1])
    assert sum(map(len, grouped)) == len(list(drafter.parameters()))
    assert all(g["weight_decay"] == 0 for g in adamw.param_groups)


def test_schedules():
    cosine = OptimOptions(schedule="cosine", warmup_fraction=0.1, min_lr_ratio=0.1)
    values = [lr_factor(s, 100, cosine) for s in range(101)]
    assert values[:10] == pytest.approx([0.1 * (s + 1) for s in range(10)])
    assert values[10] == 1.0
    assert values[55] == pytest.approx(0.1 + 0.9 * 0.5)
    assert values[100] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(values[10:]))
    wsd = OptimOptions(schedule="wsd", warmup_fraction=0.1, decay_fraction=0.2)
    values = [lr_factor(s, 100, wsd) for s in range(101)]
    assert values[10:81] == [1.0] * 71
    assert values[90] == pytest.approx(0.5)
    assert values[100] == 0
    flat = OptimOptions(**CONSTANT)
    assert {lr_factor(s, 7, flat) for s in range(7)} == {1.0}


def snapshot(drafter, optimizer):
    moments = [
        x.clone()
        for inner in optimizer.optimizers
        for state in inner.state.values()
        for x in state.values()
    ]
    return [p.detach().clone() for p in drafter.parameters()] + moments


@pytest.mark.parametrize("name", NAMES)
def test_skipped_steps_change_nothing_but_a_counter(name):
    drafter = make()
    optimizer = DrafterOptimizer(drafter, OptimOptions(name=name, max_nonfinite=3), 10)
    fill_gradients(drafter)
    optimizer.step(ONE)
    before = snapshot(drafter, optimizer)

    def unchanged(result, reason):
        assert not result.applied
        assert reason in result.reason
        assert optimizer.steps == 1
        assert all(p.grad is None for p in drafter.parameters())
        after = snapshot(drafter, optimizer)
        assert len(before) == len(after)
        assert all(torch.equal(a, b) for a, b in zip(before, after))

    unchanged(optimizer.step(torch.zeros(2))[0], "zero weight")  # no micro-batch at all
    fill_gradients(drafter)
    unchanged(optimizer.step(torch.tensor([0.0, 0.0]))[0], "zero weight")
    assert optimizer.skipped_zero == 2

    fill_gradients(drafter)
    drafter.layers[1].mlp.up_proj.weight.grad[3, 4] = math.nan
    unchanged(optimizer.step(ONE)[0], "gradient of layers.1.mlp.up_proj.weight")
    fill_gradients(drafter)
    unchanged(optimizer.step(torch.tensor([math.inf, 1.0]))[0], "non-finite loss")
    assert optimizer.skipped_nonfinite == 2

    fill_gradients(drafter)  # a good step ends the row of bad ones
    assert optimizer.step(ONE)[0].applied
    for _ in range(2):
        fill_gradients(drafter)
        drafter.fc.weight.grad[0, 0] = math.inf
        optimizer.step(ONE)
    fill_gradients(drafter)
    drafter.fc.weight.grad[0, 0] = math.inf
    with pytest.raises(UserError, match=r"gradient of fc.weight was not finite in 3 steps"):
        optimizer.step(ONE)
    assert optimizer.skipped_nonfinite == 5


@pytest.mark.parametrize("name", NAMES)
def test_allocated_moments_change_no_bit_of_training(name):
    """The rehearsal's steps of zero: parameters stay, and later steps are those of a fresh one."""

    def trained(allocate):
        drafter = make()
        before = [p.detach().clone() for p in drafter.parameters()]
        optimizer = DrafterOptimizer(drafter, OptimOptions(name=name, weight_decay=0.1), 10)
        if allocate:
            optimizer.allocate()
            assert all(torch.equal(a, b) for a, b in zip(before, drafter.parameters()))
            assert optimizer.steps == 0
            moments = snapshot(drafter, optimizer)[len(before) :]
            assert not any(x.any() for x in moments)
            fill_gradients(drafter, seed=9)
            optimizer.rehearse(torch.zeros_like(ONE))
            assert all(torch.equal(a, b) for a, b in zip(before, drafter.parameters()))
            assert all(p.grad is None for p in drafter.parameters())
        for step in range(3):
            fill_gradients(drafter, seed=step)
            optimizer.step(ONE)
        return snapshot(drafter, optimizer), optimizer.state_dict()["counters"]

    (fresh, counters), (allocated, same) = trained(False), trained(True)
    assert counters == same
    assert len(fresh) == len(allocated)
    assert all(torch.equal(a, b) for a, b in zip(fresh, allocated))


def test_wrong_options_are_errors():
    for options in (
        {"lr": -1.0},
        {"lr": math.nan},
        {"clip": -1.0},
        {"warmup_fraction": 1.5},
        {"max_nonfinite": 0},
        {"warmup_fraction": 0.6, "decay_fraction": 0.6},
    ):
        with pytest.raises(UserError):
            OptimOptions(**options)
