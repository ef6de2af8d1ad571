"""The target as a teacher: what a loss against its own distribution needs beside the taps.

That is the output of its last decoder layer, handed over as one more tap and not yet normed as all
taps are, and its final norm; the head is the drafter's already.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dflash_ext.errors import UserError
from dflash_ext.target import Target, decoder_layers

_PROBE_TOKENS = 8


@torch.no_grad()
def final_norm(target: Target) -> nn.Module:
    """The module that turns the last layer's output into what the target's head reads.

    Found by trying: a forward of a few tokens must come out as head(norm(last layer)). UserError
    if no module beside the decoder layers does that, as in targets that scale or cap their logits.
    """
    model, layers = target.model, decoder_layers(target.model, target.num_layers)
    siblings = next(list(m.children()) for m in model.modules() if layers in m.children())
    head = target.vocabulary().head
    ids = torch.arange(min(_PROBE_TOKENS, len(head)), device=target.device)[None]
    last, logits = _last_layer_and_logits(model, layers[-1], ids)
    logits = logits[..., : len(head)]
    for module in siblings:
        shapes = {tuple(p.shape) for p in module.parameters()}
        if shapes == {(target.hidden_size,)}:
            ours = module(last) @ head.T
            # The same operations on the same rows, so what differs is at most a rounding.
            unit = torch.finfo(target.dtype).eps * logits.abs().max()
            if (ours - logits).abs().max() <= 2 * unit:
                return module
    raise UserError(
        f"target {type(model).__name__}: its logits are not its head over a norm of the last "
        "decoder layer, so losses kl and lk cannot use it: choose ce or dpace"
    )


def _last_layer_and_logits(model: Any, layer: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Output [1, n, Ht] of the last decoder layer and logits [1, n, V] of a whole forward."""
    outputs: list[Tensor] = []

    def keep(_module: nn.Module, _args: Any, output: Any) -> None:
        outputs.append((output[0] if isinstance(output, tuple) else output).clone())

    handle = layer.register_forward_hook(keep)
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()
    return outputs[0], logits
