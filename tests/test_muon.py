"""Muon against its definition by singular values, and against torch's own where torch has one."""

from __future__ import annotations

import pytest
import torch

from dflash_ext import muon
from dflash_ext.muon import NEWTON_SCHULZ, Muon, orthogonalise

SHAPES = [(24, 40), (40, 24), (16, 16)]
ADJUST = ["original", "match_rms_adamw"]
RATES = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}


def by_singular_values(matrix: torch.Tensor) -> torch.Tensor:
    """An odd polynomial of a matrix acts on its singular values alone."""
    a, b, c = NEWTON_SCHULZ
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()  # the Frobenius norm
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ v


@pytest.mark.parametrize("shape", SHAPES)
def test_the_iteration_is_a_polynomial_of_the_singular_values(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 30
    torch.testing.assert_close(
        orthogonalise(matrix), by_singular_values(matrix).float(), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("adjust", ADJUST)
@pytest.mark.parametrize("shape", SHAPES)
def test_two_steps_by_the_formula(shape, adjust):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(shape))
    own, expected = Muon([p], adjust_lr_fn=adjust, **RATES), p.detach().double()
    buffer, (m, n) = torch.zeros(shape).double(), shape
    factor = 0.2 * max(m, n) ** 0.5 if adjust == "match_rms_adamw" else max(1, m / n) ** 0.5
    for _ in range(2):
        p.grad = torch.randn(shape)
        buffer = 0.9 * buffer + 0.1 * p.grad
        direction = by_singular_values(0.1 * p.grad + 0.9 * buffer)
        expected = expected * (1 - 0.02 * 0.1) - 0.02 * factor * direction
        own.step()
    torch.testing.assert_close(p.detach(), expected.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon of its own")
@pytest.mark.parametrize("adjust", ADJUST)
@pytest.mark.parametrize("shape", SHAPES)
def test_in_bf16_every_bit_is_torch_s(monkeypatch, shape, adjust):
    """What a GPU computes: torch iterates in bf16 everywhere."""
    monkeypatch.setattr(muon, "iteration_dtype", lambda _: torch.bfloat16)
    torch.manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(shape))
    theirs = torch.nn.Parameter(ours.detach().clone())
    own = Muon([ours], adjust_lr_fn=adjust, **RATES)
    peer = torch.optim.Muon([theirs], adjust_lr_fn=adjust, **RATES)
    for _ in range(3):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        own.step()
        peer.step()
    assert torch.equal(ours, theirs)
    for key, value in peer.state[theirs].items():
        assert torch.equal(own.state[ours][key], value)


def test_a_parameter_without_a_gradient_stays():
    p = torch.nn.Parameter(torch.ones(4, 4))
    Muon([p], **RATES).step()
    assert torch.equal(p, torch.ones(4, 4))
    with pytest.raises(ValueError, match="closure"):
        Muon([p], **RATES).step(lambda: 0.0)
