"""The hand-over from target to drafter: tapped features and the proof that they are the right ones.

A drafter trained on someone else's features learns nothing and says nothing (requirement 8), so
a feature batch names what it was computed from and is compared with the token batch before use.
Shapes: T tokens of a packed batch, K taps, Ht width of one tap (the target's hidden size).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_ext.batch import PackedBatch
from dflash_ext.errors import FeatureError


@dataclass(frozen=True)
class FeatureBatch:
    features: Tensor
    """bf16 or fp32 [T, K*Ht] on the target's device: rows in packed order, taps as in `tap_ids`."""
    tap_ids: tuple[int, ...]
    """Decoder layers whose outputs were taken."""
    sample_ids: tuple[int, ...]
    """Documents in packed order."""
    token_hash: str
    """`PackedBatch.token_hash` of the tokens the target really read."""
    rows: int
    """T."""

    def content_flags(self) -> Tensor:
        """bool [2] on the features' device: all finite; no row of a tap all zero. No host sync."""
        # The infinity norm carries NaN and inf through, so one pass answers both questions.
        taps = self.features.view(self.rows, len(self.tap_ids), -1)
        norm = torch.linalg.vector_norm(taps, ord=float("inf"), dim=-1)
        return torch.stack([torch.isfinite(norm).all(), (norm != 0).all()])

    def verify(self, batch: PackedBatch, tap_ids: Sequence[int], width: int) -> None:
        """Raise FeatureError unless these are the features of `batch` at `tap_ids`, Ht = `width`.

        Waits for the device once, to see that they are finite and not zero.
        """
        name = f"features of samples {_short(batch.sample_ids)}"
        if self.sample_ids != batch.sample_ids:
            raise FeatureError(
                f"{name}: they belong to samples {_short(self.sample_ids)} in that order"
            )
        if self.token_hash != batch.token_hash():
            raise FeatureError(f"{name}: they were computed from other tokens (hash differs)")
        if self.rows != batch.num_tokens or self.features.shape[0] != batch.num_tokens:
            raise FeatureError(
                f"{name}: expected {batch.num_tokens} rows, got {self.features.shape[0]} "
                f"(announced {self.rows})"
            )
        expected, got = tuple(tap_ids), self.tap_ids
        if len(got) != len(expected):
            raise FeatureError(f"{name}: expected {len(expected)} taps × {width}, got {len(got)}")
        if got != expected:
            raise FeatureError(f"{name}: expected taps {list(expected)}, got {list(got)}")
        if self.features.dim() != 2 or self.features.shape[1] != len(got) * width:
            raise FeatureError(
                f"{name}: expected {len(got)} taps × {width} = {len(got) * width} columns, "
                f"got shape {tuple(self.features.shape)}"
            )
        finite, nonzero = self.content_flags().tolist()
        if not finite:
            raise FeatureError(f"{name}: not finite")
        if not nonzero:
            raise FeatureError(f"{name}: rows that are all zero")


def _short(sample_ids: Sequence[int]) -> str:
    """Sample ids for a message; long lists are cut."""
    shown = ", ".join(str(s) for s in sample_ids[:16])
    return f"[{shown}{', …' if len(sample_ids) > 16 else ''}]"
