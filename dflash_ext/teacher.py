"""The target as a teacher: what a loss against its own distribution needs beside the taps.

That is the output of its last decoder layer, handed over as one more tap and not yet normed as all
taps are, and its final norm; the head is the drafter's already.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dflash_ext.errors import UserError
from dflash_ext.target import Target
from dflash_ext.target_loading import Absent, decoder_layers

_PROBE_TOKENS = 8


@torch.no_grad()
def final_norm(target: Target) -> nn.Module:
    """The module that turns the last layer's output into what the target's head reads.

    Found by trying: a forward of a few tokens must come out as head(norm(last layer)). UserError
    if no module beside the decoder layers does that, as in targets that scale or cap their logits.
    Where the layers are not loaded, the embedding stands for the last layer's output; a rank that
    has them tries the rest (`check_teacher`).
    """
    head, probe = target.vocabulary().head, _probe(target, to_the_end=True)
    logits = probe.result.logits[..., : len(head)]
    # The same operations on the same rows, so what differs is at most a rounding.
    unit = torch.finfo(target.dtype).eps * logits.abs().max()
    for module, given in probe.candidates():
        if (module(given) @ head.T - logits).abs().max() <= 2 * unit:
            return module
    raise _no_teacher(target)


@torch.no_grad()
def check_teacher(target: Target) -> None:
    """UserError unless a norm reads just what the last layer gives; needs no head."""
    if not _probe(target, to_the_end=False).candidates():
        raise _no_teacher(target)


def _no_teacher(target: Target) -> UserError:
    return UserError(
        f"target {type(target.model).__name__}: its logits are not its head over a norm of the "
        "last decoder layer, so losses kl and lk cannot use it: choose ce or dpace"
    )


@dataclass
class _Probe:
    """What a forward of a few tokens showed; tensors are [1, n, Ht]."""

    inputs: dict[nn.Module, Tensor] = field(default_factory=dict)
    """What each norm beside the decoder layers was given."""
    last: Tensor | None = None
    """The last layer's output, if it is loaded."""
    result: Any = None

    def candidates(self) -> list[tuple[nn.Module, Tensor]]:
        """Norms that may be the final one, and their inputs."""
        found = self.inputs.items()
        return [(m, x) for m, x in found if self.last is None or torch.equal(x, self.last)]


def _probe(target: Target, *, to_the_end: bool) -> _Probe:
    """One forward, with or without the head; decoder layers that are not loaded are passed over."""
    model, layers = target.model, decoder_layers(target.model, target.num_layers)
    stack = next(m for m in model.modules() if layers in m.children())
    place = next(name for name, child in stack.named_children() if child is layers)
    probe, handles = _Probe(), []

    def keep_input(module: nn.Module, given: Any) -> None:
        probe.inputs[module] = given[0].clone()

    def keep_last(_module: nn.Module, _given: Any, output: Any) -> None:
        probe.last = (output[0] if isinstance(output, tuple) else output).clone()

    for module in stack.children():
        if {tuple(p.shape) for p in module.parameters()} == {(target.hidden_size,)}:
            handles.append(module.register_forward_pre_hook(keep_input))
    handles.append(layers[-1].register_forward_hook(keep_last))
    if any(isinstance(layer, Absent) for layer in layers):
        setattr(stack, place, nn.ModuleList())
    ids = torch.arange(min(_PROBE_TOKENS, target.embedding_rows), device=target.device)[None]
    try:
        probe.result = (model if to_the_end else stack)(input_ids=ids, use_cache=False)
    finally:
        setattr(stack, place, layers)
        for handle in handles:
            handle.remove()
    return probe
