"""Optimizer steps: Muon and AdamW, schedules, clipping, and the steps that must not happen.

The gradients that arrive here are those of the loss NUMERATOR, summed over the micro-batches of a
step. Dividing them once by the global weight makes the step independent of how its samples were
split (requirement 11).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_ext.config import OptimOptions
from dflash_ext.drafter import Drafter
from dflash_ext.errors import UserError
from dflash_ext.muon import Muon
from dflash_ext.parallel import local, placed_like, sum_over

DEFAULT_LR = {"muon": 0.02, "adamw": 6e-4}
DEFAULT_VECTOR_LR = 6e-4


def lr_factor(step: int, total: int, options: OptimOptions) -> float:
    """Learning rate over its peak at optimizer step `step` of `total` (0-based); pure.

    Linear warm-up over the first `warmup_fraction`, then cosine to `min_lr_ratio`, or (wsd)
    constant and a linear decay over the last `decay_fraction`.
    """
    warmup = math.ceil(options.warmup_fraction * total)
    if step < warmup:
        return (step + 1) / warmup
    if options.schedule == "cosine":
        progress = (step - warmup) / max(1, total - warmup)
        fall = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    else:
        decay = max(1, math.ceil(options.decay_fraction * total))
        fall = min(1.0, max(0.0, (total - step) / decay))
    return options.min_lr_ratio + (1 - options.min_lr_ratio) * fall


@dataclass(frozen=True)
class StepResult:
    """What one call of `DrafterOptimizer.step` did."""

    applied: bool
    reason: str = ""
    """"", "zero weight" or "non-finite <tensor>" of a skipped step."""
    grad_norm: float = 0.0
    """Of the normalised gradient, before clipping."""
    lr: float = 0.0
    """Of the matrices."""


def divisor(stats: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """What the gradients are divided by, and 1.0 where the step must not happen; fp32 scalars.

    stats: fp32, first the norm of the gradients of the loss numerator, then numerator and weight.
    The mean's gradient g / weight has the norm n / weight; clipped to `clip` (0: not) it is
    g / max(weight, n / clip).
    """
    norm, weight = stats[0], stats[2]
    good = stats[:3].isfinite().all() & (weight != 0)
    scale = torch.maximum(weight, norm / clip) if clip else weight
    return torch.where(good, scale, 1.0), 1.0 - good.float()


def on_its_way(values: Tensor) -> Callable[[], list[float]]:
    """Starts a copy to the host; call the result for the values, waiting for the copy alone."""
    if values.device.type != "cuda":
        return values.tolist
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(values.device))

    def told() -> list[float]:
        copied.synchronize()
        return host.tolist()

    return told


class DrafterOptimizer:
    """Muon or AdamW over the drafter's fp32 masters, with the schedule and the skip rules."""

    def __init__(
        self,
        drafter: Drafter,
        options: OptimOptions,
        total_steps: int,
        *,
        shard_group: Any = None,
    ) -> None:
        """shard_group: process group over which the drafter's parameters are sharded, if any."""
        self.options, self.total_steps = options, total_steps
        self.shard_group = shard_group
        self.parameters = dict(drafter.named_parameters())
        self.steps = 0
        """Optimizer steps applied; the schedule's position."""
        self.skipped_zero = 0
        self.skipped_nonfinite = 0
        self.consecutive_nonfinite = 0
        matrices = [p for p in self.parameters.values() if p.dim() == 2]
        vectors = [p for p in self.parameters.values() if p.dim() != 2]
        lr = DEFAULT_LR[options.name] if options.lr is None else options.lr
        vector_lr = DEFAULT_VECTOR_LR if options.vector_lr is None else options.vector_lr
        self.peak_lr = lr
        groups: list[dict[str, Any]] = [{"params": vectors, "lr": vector_lr, "weight_decay": 0.0}]
        self.optimizers: list[torch.optim.Optimizer] = []
        if options.name == "muon":
            self.optimizers.append(
                Muon(
                    matrices,
                    lr=lr,
                    weight_decay=options.weight_decay,
                    momentum=options.momentum,
                    adjust_lr_fn=options.muon_adjust,
                )
            )
        else:
            groups.append({"params": matrices, "lr": lr, "weight_decay": options.weight_decay})
        fused = torch.optim.AdamW(groups, betas=options.betas, eps=1e-8, fused=True)
        self.optimizers.append(fused)
        # The fused kernel takes the divisor of the gradients, and whether to do anything at all,
        # from the device. Muon has no such thing, and sharded parameters take no plain tensors.
        self._undecided: Any = fused if options.name == "adamw" and shard_group is None else None
        for group in self._groups():
            group["peak_lr"] = group["lr"]

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def allocate(self) -> None:
        """Make the moments of a fresh optimizer, as zeros, and gradients of zero.

        By a step of zero gradient and zero rate, which changes no parameter and needs the memory a
        real one needs.
        """
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        for group in self._groups():
            group["lr"] = 0.0
        for optimizer in self.optimizers:
            optimizer.step()
            for state in optimizer.state.values():
                if "step" in state:
                    state["step"].zero_()

    def rehearse(self, sums: Tensor) -> None:
        """A step of a fresh optimizer that changes nothing: `sums`, as of `step`, are zeros."""
        self.step(sums)
        self.skipped_zero = 0

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def step(self, sums: Tensor) -> tuple[StepResult, list[float]]:
        """One optimizer step from the accumulated gradients of the loss numerator.

        sums: fp32 vector on the device whose first two entries are the global loss numerator and
        weight (`metrics.slot_sums`); gradients and sums are those of all drafters already, so that
        all of them decide alike. Returns what happened and `sums` on the host: the only time a step
        waits for the device. Gradients are cleared. A step of zero weight, or with a non-finite
        loss or gradient, changes nothing but its counter; UserError after `max_nonfinite`
        non-finite ones in a row, naming the tensor.
        """
        gradients = [local(p.grad) for p in self.parameters.values() if p.grad is not None]
        if not gradients:
            return self._skip_zero_weight(), sums.tolist()
        factor = lr_factor(self.steps, self.total_steps, self.options)
        for group in self._groups():
            group["lr"] = group["peak_lr"] * factor
        stats = torch.cat([self._norm(gradients)[None], sums])
        told = on_its_way(stats)
        if self._undecided is not None:
            # Before the host has read: the device works while the host decides what comes next.
            self._undecided.grad_scale, bad = divisor(stats, self.options.clip)
            self._undecided.found_inf = bad
            self._undecided.step()
        numerator_norm, *values = told()
        numerator, weight = values[:2]
        if weight == 0:
            return self._skip_zero_weight(), values
        if not all(map(math.isfinite, (numerator_norm, numerator, weight))):
            return self._skip_nonfinite(numerator), values
        if self._undecided is None:
            scale, _ = divisor(torch.tensor([numerator_norm, numerator, weight]), self.options.clip)
            torch._foreach_div_(gradients, float(scale))
            for optimizer in self.optimizers:
                optimizer.step()
        self.zero_grad()
        self.steps += 1
        self.consecutive_nonfinite = 0
        return StepResult(True, "", numerator_norm / weight, self.peak_lr * factor), values

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        """fp32 scalar: norm of all gradients; of sharded ones over all drafters' parts."""
        norms = torch.stack(torch._foreach_norm(gradients))
        if self.shard_group is None:
            return norms.norm()
        square = norms.square().sum()
        sum_over(self.shard_group, [square])
        return square.sqrt()

    def _bad_gradients(self) -> list[str]:
        """Names of the parameters whose gradient is not finite on any drafter."""
        names = list(self.parameters)
        grads = [self.parameters[name].grad for name in names]
        bad = torch.tensor([g is not None and not bool(local(g).isfinite().all()) for g in grads])
        if self.shard_group is not None:
            counts = bad.to(local(self.parameters[names[0]]).device, torch.float32)
            sum_over(self.shard_group, [counts])
            bad = counts.cpu() > 0
        return [name for name, wrong in zip(names, bad.tolist()) if wrong]

    def _skip_zero_weight(self) -> StepResult:
        self.zero_grad()
        self.skipped_zero += 1
        return StepResult(False, "zero weight")

    def _skip_nonfinite(self, numerator: float) -> StepResult:
        bad = self._bad_gradients()
        # A finite gradient of overflowing norm still names the loss as the place to look.
        name = "loss" if not math.isfinite(numerator) else "gradient norm"
        name = f"gradient of {bad[0]}" if bad else name
        self.zero_grad()
        self.skipped_nonfinite += 1
        self.consecutive_nonfinite += 1
        if self.consecutive_nonfinite >= self.options.max_nonfinite:
            raise UserError(
                f"{name} was not finite in {self.consecutive_nonfinite} steps in a row (loss "
                f"numerator {numerator}): lower the learning rate or look at the data"
            )
        return StepResult(False, f"non-finite {name}")

    def state_dict(self) -> dict[str, Any]:
        """Moments, schedule position and counters; plain containers and tensors."""
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "counters": {name: getattr(self, name) for name in _COUNTERS},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Exact inverse of `state_dict` for the same drafter and optimizer options.

        Moments are whole; of a sharded drafter its own part of them is taken.
        """
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            moments = {
                number: {
                    name: placed_like(value, parameters[number]) if value.dim() else value
                    for name, value in found.items()
                }
                for number, found in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": moments})
        for name in _COUNTERS:
            setattr(self, name, state["counters"][name])


_COUNTERS = ("steps", "skipped_zero", "skipped_nonfinite", "consecutive_nonfinite")
