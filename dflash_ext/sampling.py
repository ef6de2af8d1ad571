"""How a token is drawn: greedy, or at random with a random number that belongs to its position.

A sampled token is argmax(log p + Gumbel noise), a draw from p, and the noise of a token at a
position is a function of (seed, position, token id) alone. So a target that reads one token at a
time, many, or a tree of them draws the same text, and a guess is accepted iff it is the draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_ext.errors import UserError

_ROWS_AT_ONCE = 64  # noise and sorted copies exist for so many rows of logits
_BITS = 2**64
# Steele, Lea, Flood: "Fast splittable pseudorandom number generators" (2014), SplitMix64.
_GAMMA, _MIX = 0x9E3779B97F4A7C15, ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


@dataclass(frozen=True)
class Sampling:
    """What is drawn from: softmax(logits / temperature), cut to the top k, then to the nucleus."""

    temperature: float = 0.0
    """0: the likeliest token, always."""
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature {self.temperature}: expected a finite number from 0 on")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k {self.top_k}: expected at least 1, or none")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p}: expected above 0 and at most 1, or none")
        if self.greedy and (self.top_k, self.top_p) != (None, None):
            raise UserError(
                f"top_k {self.top_k} and top_p {self.top_p} do nothing at temperature 0: give a "
                "temperature too"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def warpers(self) -> list[Any]:
        """transformers' own, in the order of its `generate`."""
        from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        found: list[Any] = [TemperatureLogitsWarper(float(self.temperature))]
        if self.top_k is not None:
            found.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None and self.top_p < 1:
            found.append(TopPLogitsWarper(self.top_p))
        return found


GREEDY = Sampling()


def _mix(z: int) -> int:
    for shift, factor in _MIX:
        z = (z ^ (z >> shift)) * factor % _BITS
    return z


def _signed(z: int) -> int:
    """The int64 with the bits of an unsigned 64-bit integer."""
    return z - _BITS if z >= _BITS // 2 else z


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64, which torch shifts arithmetically."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def gumbel_noise(
    seed: int, positions: Sequence[int], vocab_size: int, device: torch.device | str
) -> Tensor:
    """Standard Gumbel noise, fp32 [len(positions), vocab_size], the same on every device.

    Bits of a 53-bit uniform come from SplitMix64 with one stream per (seed, position).
    """
    streams = [_signed(_mix(_mix(seed % _BITS) + p * _GAMMA & _BITS - 1)) for p in positions]
    z = torch.arange(1, vocab_size + 1, device=device) * _signed(_GAMMA)
    z = z + torch.tensor(streams, dtype=torch.int64).to(device)[:, None]
    for shift, factor in _MIX:
        z = (z ^ _shift(z, shift)) * _signed(factor)
    uniform = (_shift(z, 11).double() + 0.5) * 2.0**-53
    return uniform.log_().neg_().log_().neg_().float()


def draw(logits: Tensor, positions: Sequence[int], sampling: Sampling = GREEDY) -> Tensor:
    """The tokens int64 [n] that `logits` [n, V] say for `positions` (of the tokens drawn)."""
    if sampling.greedy:
        return logits.argmax(-1)
    tokens, warpers = [], sampling.warpers()
    for start in range(0, logits.shape[0], _ROWS_AT_ONCE):
        scores = logits[start : start + _ROWS_AT_ONCE].float()
        for warper in warpers:
            scores = warper(None, scores)
        at = positions[start : start + _ROWS_AT_ONCE]
        distinct = sorted(set(at))  # nodes of a tree share their depth's noise
        noise = gumbel_noise(sampling.seed, distinct, logits.shape[1], logits.device)
        which = torch.tensor([distinct.index(p) for p in at], dtype=torch.int64)
        tokens.append((scores + noise[which.to(logits.device)]).argmax(-1))
    return torch.cat(tokens) if tokens else logits.argmax(-1)
