"""Noise against a scalar implementation; draws against the distribution they are drawn from."""

from __future__ import annotations

import math

import pytest
import torch

from dflash_ext.errors import UserError
from dflash_ext.sampling import GREEDY, Sampling, draw, gumbel_noise

MASK = 2**64 - 1


def splitmix(state: int):
    """SplitMix64 as its authors write it: outputs of a stream, one by one."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        yield z ^ (z >> 31)


def test_noise_equals_the_scalar_generator():
    # The published first outputs of seed 1234567.
    stream = splitmix(1234567)
    assert next(stream) == 6457827717110365317
    assert next(stream) == 3203168211198807973

    def finaliser(z):
        return next(splitmix((z - 0x9E3779B97F4A7C15) & MASK))

    for seed, position in ((0, 0), (7, 3), (2**63, 10**6), (5, 5)):
        start = finaliser((finaliser(seed) + position * 0x9E3779B97F4A7C15) & MASK)
        noise = gumbel_noise(seed, [9, position], 40, "cpu")
        for value, bits in zip(noise[1].tolist(), splitmix(start)):
            uniform = ((bits >> 11) + 0.5) / 2**53
            assert value == pytest.approx(-math.log(-math.log(uniform)), rel=1e-6, abs=1e-6)


def test_noise_belongs_to_seed_position_and_token():
    noise = gumbel_noise(1, [4, 5, 4], 50, "cpu")
    assert torch.equal(noise[0], noise[2])
    assert not torch.equal(noise[0], noise[1])
    assert torch.equal(gumbel_noise(1, [5], 30, "cpu")[0], noise[1, :30])  # whatever the vocabulary
    assert not torch.equal(gumbel_noise(2, [4], 50, "cpu")[0], noise[0])
    many = gumbel_noise(3, range(400), 500, "cpu").double()
    assert float(many.mean()) == pytest.approx(0.5772, abs=0.01)  # Euler's constant
    assert float(many.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)
    correlation = torch.corrcoef(many[:8])
    assert (correlation - torch.eye(8)).abs().max() < 0.2


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.5, seed=1),
        Sampling(temperature=2.0, top_k=4, seed=2),
        Sampling(temperature=1.0, top_p=0.8, seed=3),
        Sampling(temperature=1.5, top_k=7, top_p=0.9, seed=4),
    ],
)
def test_draws_follow_the_distribution(sampling):
    """Chi-square over 20,000 positions, and nothing outside what top-k and top-p leave."""
    logits = torch.tensor([2.0, -1.0, 0.3, 1.1, 0.2, -0.5, 1.9, -2.0, 0.8, 0.0])
    p = (logits.double() / sampling.temperature).softmax(0)
    order = p.argsort(descending=True)
    allowed = set(order[: sampling.top_k or 10].tolist())
    if sampling.top_p:
        q = p * torch.tensor([i in allowed for i in range(10)])
        q /= q.sum()
        before = torch.cat([torch.zeros(1), q[order].cumsum(0)[:-1]])  # mass above each token
        allowed &= {int(i) for i, above in zip(order, before) if above < sampling.top_p}
    p = p * torch.tensor([i in allowed for i in range(10)])
    p /= p.sum()
    n = 20000
    drawn = draw(logits.expand(n, -1), list(range(n)), sampling)
    counts = torch.bincount(drawn, minlength=10).double()
    assert set(drawn.tolist()) == allowed
    possible = p > 0
    chi = ((counts - n * p) ** 2 / (n * p))[possible].sum()
    assert chi < 27.9  # 99.9 % of chi-square with 9 degrees of freedom


def test_rows_of_one_position_share_their_noise():
    torch.manual_seed(0)
    logits, sampling = torch.randn(150, 30), Sampling(temperature=1.0, seed=9)
    places = [int(i) for i in torch.randint(0, 9, (150,))]
    together = draw(logits, places, sampling)
    alone = [int(draw(row[None], [place], sampling)) for row, place in zip(logits, places)]
    assert together.tolist() == alone
    same = draw(logits[:1].expand(9, -1), [4] * 9, sampling)
    assert len(set(same.tolist())) == 1
    assert torch.equal(draw(logits, places, GREEDY), logits.argmax(-1))
    assert draw(logits[:0], [], sampling).shape == (0,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"temperature": 1.0, "top_k": 0}, "top_k 0"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p 0.0"),
        ({"temperature": 1.0, "top_p": 1.1}, "top_p 1.1"),
        ({"top_k": 5}, "do nothing at temperature 0"),
    ],
)
def test_impossible_options(options, message):
    with pytest.raises(UserError, match=message):
        Sampling(**options)
