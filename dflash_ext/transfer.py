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
from dflash_ext.watch import short_ids


def with_last_layer(tap_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Taps of a feature batch for a loss that needs the target's last layer: it comes at the end.

    A second time, if it is a tap of the drafter's too.
    """
    return (*tap_ids, num_layers - 1)


@dataclass(frozen=True)
class FeatureBatch:
    features: Tensor
    """bf16 or fp32 [T, K*Ht] on the target's device: rows in packed order, taps as in `tap_ids`.

    For losses against the target's distribution the last tap is its last layer."""
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
        self.verify_origin(batch, tap_ids, width)
        self.verify_content(batch, self.content_flags().tolist())

    def verify_origin(self, batch: PackedBatch, tap_ids: Sequence[int], width: int) -> None:
        """The part of `verify` that does not look at the values."""
        name = f"features of samples {short_ids(batch.sample_ids)}"
        if self.sample_ids != batch.sample_ids:
            raise FeatureError(
                f"{name}: they belong to samples {short_ids(self.sample_ids)} in that order"
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

    def verify_content(self, batch: PackedBatch, flags: Sequence[bool]) -> None:
        """Raise FeatureError for `content_flags` that say no."""
        name = f"features of samples {short_ids(batch.sample_ids)}"
        finite, nonzero = flags
        if not finite:
            raise FeatureError(f"{name}: not finite")
        if not nonzero:
            raise FeatureError(f"{name}: rows that are all zero")


# One header precedes each feature batch: int64, of one size for all batches of a run.
_FIXED = 16
_MAGIC = 0x44464C41_53480001
_DTYPES = (torch.bfloat16, torch.float32)
_KINDS = ("train", "held-out")


@dataclass(frozen=True)
class Announcement:
    """What a target says about a feature batch it hands over, beside the features themselves."""

    kind: str
    index: int
    shape: tuple[int, int]
    """Of the features, as the target has them."""
    dtype: torch.dtype
    tap_ids: tuple[int, ...]
    sample_ids: tuple[int, ...]
    token_hash: str
    rows: int
    waited: float
    """Seconds this target waited for room since its last announcement."""
    elapsed: float
    """Seconds since its last announcement."""
    reserved: int
    """Bytes of device memory that the target's process holds (0 on a CPU)."""

    @staticmethod
    def size(max_documents: int, taps: int) -> int:
        """Values of an encoded header."""
        return _FIXED + taps + max_documents

    def encode(self, size: int) -> Tensor:
        """int64 [size], on the CPU. FeatureError if there are more documents or taps than fit."""
        head = [
            _MAGIC,
            _KINDS.index(self.kind),
            self.index,
            *self.shape,
            _DTYPES.index(self.dtype),
            len(self.tap_ids),
            len(self.sample_ids),
            self.rows,
            *(int(self.token_hash[i : i + 8], 16) for i in range(0, 32, 8)),
            round(self.waited * 1e6),
            round(self.elapsed * 1e6),
            self.reserved,
        ]
        assert len(head) == _FIXED
        values = head + list(self.tap_ids) + list(self.sample_ids)
        if len(values) > size:
            raise FeatureError(
                f"{len(self.sample_ids)} documents and {len(self.tap_ids)} taps do not fit a header"
                f" of {size} values"
            )
        header = torch.zeros(size, dtype=torch.int64)
        header[: len(values)] = torch.tensor(values)
        return header

    @classmethod
    def decode(cls, header: Tensor) -> Announcement:
        """Inverse of `encode`; FeatureError if the header is none."""
        values = header.tolist()
        if values[0] != _MAGIC:
            raise FeatureError("the header of a feature batch is damaged: expected its first word")
        kind, index, rows, columns, dtype, taps, documents, announced = values[1:9]
        tap_end = _FIXED + taps
        return cls(
            kind=_KINDS[kind],
            index=index,
            shape=(rows, columns),
            dtype=_DTYPES[dtype],
            tap_ids=tuple(values[_FIXED:tap_end]),
            sample_ids=tuple(values[tap_end : tap_end + documents]),
            token_hash="".join(f"{word:08x}" for word in values[9:13]),
            rows=announced,
            waited=values[13] / 1e6,
            elapsed=values[14] / 1e6,
            reserved=values[15],
        )
