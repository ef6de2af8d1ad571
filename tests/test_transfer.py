"""Requirement 8: features that are not those of the batch never reach the drafter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dflash_ext.batch import PackedBatch
from dflash_ext.errors import FeatureError
from dflash_ext.transfer import Announcement, FeatureBatch

TAPS, WIDTH = (1, 9, 17, 25, 33), 8


def packed(sample_ids) -> PackedBatch:
    torch.manual_seed(0)
    documents = [
        (torch.randint(0, 50, (3 + i % 4,)), torch.ones(3 + i % 4, dtype=torch.bool))
        for i in range(len(sample_ids))
    ]
    return PackedBatch.from_documents(documents, sample_ids)


def produced(batch: PackedBatch, **changes) -> FeatureBatch:
    torch.manual_seed(1)
    good = FeatureBatch(
        features=torch.randn(batch.num_tokens, len(TAPS) * WIDTH),
        tap_ids=TAPS,
        sample_ids=batch.sample_ids,
        token_hash=batch.token_hash(),
        rows=batch.num_tokens,
    )
    return dataclasses.replace(good, **changes)


def refused(batch: PackedBatch, match: str, **changes) -> None:
    with pytest.raises(FeatureError, match=match) as error:
        produced(batch, **changes).verify(batch, TAPS, WIDTH)
    assert "\n" not in str(error.value)


def test_the_right_features_pass():
    batch = packed([4, 7])
    produced(batch).verify(batch, TAPS, WIDTH)
    produced(batch).verify(batch, list(TAPS), WIDTH)


def test_zeros_are_refused():
    batch = packed([4, 7])
    good = produced(batch).features
    refused(batch, r"samples \[4, 7\]: rows that are all zero", features=torch.zeros_like(good))
    one_tap_of_one_row = good.clone()
    one_tap_of_one_row[2, WIDTH : 2 * WIDTH] = 0
    refused(batch, "all zero", features=one_tap_of_one_row)
    zero_values = good.clone()
    zero_values[:, ::3] = 0  # zeros as such are nothing wrong
    produced(batch, features=zero_values).verify(batch, TAPS, WIDTH)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_not_finite_is_refused(value, dtype):
    batch = packed([4, 7])
    features = produced(batch).features.to(dtype)
    produced(batch, features=features).verify(batch, TAPS, WIDTH)
    features[3, 5] = value
    refused(batch, "not finite", features=features)


def test_one_row_short_is_refused():
    batch = packed([4, 7])
    T, features = batch.num_tokens, produced(batch).features[:-1]
    refused(batch, f"expected {T} rows, got {T - 1}", features=features)
    refused(batch, f"expected {T} rows, got {T - 1}", features=features, rows=T - 1)


@pytest.mark.parametrize("count", [2, 11, 30])
def test_swapped_order_is_refused(count):
    batch = packed(list(range(count)))
    swapped = tuple(reversed(batch.sample_ids))
    refused(batch, "in that order", sample_ids=swapped)
    if count > 10:  # the classical case: ids sorted as text, "10" before "2"
        refused(batch, "in that order", sample_ids=tuple(sorted(batch.sample_ids, key=str)))


def test_features_of_the_same_ids_in_another_order_of_documents_are_refused():
    batch = packed(list(range(12)))
    documents = [
        (batch.input_ids[a:b], batch.loss_mask[a:b])
        for a, b in zip(batch.doc_starts.tolist(), batch.doc_starts.tolist()[1:])
    ]
    other = PackedBatch.from_documents(documents[::-1], batch.sample_ids)
    refused(batch, "other tokens", token_hash=other.token_hash())


def test_wrong_taps_are_refused():
    batch = packed([4, 7])
    features = torch.randn(batch.num_tokens, 4 * 2560)
    four = produced(batch, features=features, tap_ids=TAPS[:4])
    with pytest.raises(FeatureError, match="expected 5 taps × 2560, got 4"):
        four.verify(batch, TAPS, 2560)
    refused(batch, r"expected taps \[1, 9, 17, 25, 33\], got \[1, 17", tap_ids=(1, 17, 9, 25, 33))
    narrow = torch.randn(batch.num_tokens, len(TAPS) * (WIDTH - 1))
    refused(batch, r"expected 5 taps × 8 = 40 columns, got shape", features=narrow)


def announcement(batch: PackedBatch, **changes) -> Announcement:
    good = Announcement(
        kind="held-out",
        index=12345678901,
        shape=(batch.num_tokens, len(TAPS) * WIDTH),
        dtype=torch.bfloat16,
        tap_ids=TAPS,
        sample_ids=batch.sample_ids,
        token_hash=batch.token_hash(),
        rows=batch.num_tokens,
        waited=0.25,
        elapsed=1.5,
        reserved=3 << 33,
    )
    return dataclasses.replace(good, **changes)


@pytest.mark.parametrize("count", [1, 2, 64])
def test_a_header_carries_everything(count):
    batch = packed([10**9 + i for i in range(count)])
    size = Announcement.size(64, len(TAPS))
    for told in (
        announcement(batch),
        announcement(batch, kind="train", dtype=torch.float32, waited=0.0, reserved=0),
    ):
        header = told.encode(size)
        assert (header.dtype, header.shape) == (torch.int64, (size,))
        assert Announcement.decode(header) == told


def test_a_damaged_header_or_too_many_documents_are_refused():
    batch = packed(list(range(65)))
    size = Announcement.size(64, len(TAPS))
    with pytest.raises(FeatureError, match="65 documents and 5 taps do not fit"):
        announcement(batch).encode(size)
    with pytest.raises(FeatureError, match=r"header .* is damaged"):
        Announcement.decode(torch.zeros(size, dtype=torch.int64))
