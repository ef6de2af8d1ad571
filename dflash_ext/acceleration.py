"""What of a target's forward runs on our kernels, and the proof that it computes the same.

A target is accelerated as far as it agrees with itself: packed with fused layers, packed with
transformers' own layers, or, as transformers runs it, padded. Each step is undone if the taps of a
few short documents are not those of the padded forward, so a family that computes something we do
not know of costs speed, never correctness.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dflash_ext import transformers_api
from dflash_ext.batch import PackedBatch
from dflash_ext.drafter_rules import FULL, SLIDING
from dflash_ext.fused_layer import can_fuse, fuse, unfuse
from dflash_ext.packing import INTERFACE_NAMES, set_packed_attention

log = logging.getLogger(__name__)

PROBE_LENGTHS = (23, 1, 40)
# Largest relative error of a document's median token. Rounding stays far below, also where a
# mixture's routing flips for a few tokens; a wrong mask, position or norm does not.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


class Acceleration:
    """The changes made to a model; all of them are attributes that `remove` takes away again."""

    def __init__(self, layers: Sequence[nn.Module], config: Any, *, fused: bool) -> None:
        """layers: decoder layers; config: their text config; fused: our layers where known."""
        self._fused = fused
        self._config = config
        self._attention_before = set_packed_attention(config)
        self.fused_layers = [
            (i, layer)
            for i, layer in enumerate(layers)
            if fused and can_fuse(layer, config.model_type)
        ]
        for i, layer in self.fused_layers:
            fuse(layer, config.model_type, transformers_api.window_of(config, i))

    def again(self, layers: Sequence[nn.Module]) -> Acceleration:
        """The same changes once more, after `remove`, to a model whose modules were exchanged."""
        return Acceleration(layers, self._config, fused=self._fused)

    def remove(self) -> None:
        for _, layer in self.fused_layers:
            unfuse(layer)
        transformers_api.set_attention(self._config, self._attention_before)


def why_padded(model: nn.Module, config: Any) -> str | None:
    """Why packed forwards of a model are impossible, or None. config: its text config."""
    strange = set(transformers_api.layer_types(config)) - {FULL, SLIDING}
    if strange:
        return f"no kernels for layers of {', '.join(sorted(strange))}"
    if not transformers_api.has_attention_interface(model):
        return "its attention is not behind transformers' interface"
    attention = transformers_api.attention_implementation(config)
    if attention not in INTERFACE_NAMES:
        return f"attention {attention!r} was chosen for it"
    if not getattr(config, "is_causal", True) or getattr(
        config, "use_bidirectional_attention", False
    ):
        return "its attention is not causal"
    return None


def accelerate(
    name: str,
    model: nn.Module,
    layers: Sequence[nn.Module],
    config: Any,
    taps: Callable[[PackedBatch, bool], Tensor],
) -> Acceleration | None:
    """The most that agrees with the padded forward, or None; one log line says which and why.

    name: of the target, for the log. taps: (batch, packed) -> [T, n] tapped states.
    """
    reason = why_padded(model, config)
    if reason is None:
        # Ordinary tokens: those of images and the like come late in a vocabulary.
        batch = PackedBatch.random(PROBE_LENGTHS, min(int(config.vocab_size), 1000))
        truth = taps(batch, False)
        for fused in (True, False):
            acceleration = Acceleration(layers, config, fused=fused)
            reason = _difference(batch, truth, taps)
            if reason is None:
                how = "fused" if acceleration.fused_layers else "transformers' own"
                log.info("target %s: packed forward, %s layers", name, how)
                return acceleration
            acceleration.remove()
    log.info("target %s: padded forward, as transformers runs it: %s", name, reason)
    return None


def _difference(
    batch: PackedBatch, truth: Tensor, taps: Callable[[PackedBatch, bool], Tensor]
) -> str | None:
    """What is wrong with the packed forward; None: nothing."""
    try:
        found = taps(batch, True)
    # Our operators name what they do not support; what else an unknown model may trip over is open.
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    worst, allowed = max(document_errors(batch, found, truth)), TOLERANCE[truth.dtype]
    if worst <= allowed:
        return None
    return f"its packed states differ by {worst:.2g} (at most {allowed})"


def document_errors(batch: PackedBatch, found: Tensor, truth: Tensor) -> Iterator[float]:
    """Of every document the median over its tokens of |found - truth| / |truth|; NaN: infinite."""
    for begin, end in zip(batch.doc_starts.tolist(), batch.doc_starts.tolist()[1:]):
        x, y = found[begin:end].float(), truth[begin:end].float()
        relative = (x - y).norm(dim=1) / y.norm(dim=1).clamp_min(1e-20)
        yield float(relative.nan_to_num(nan=torch.inf).median())
