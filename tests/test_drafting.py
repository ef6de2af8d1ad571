"""The drafter's cache of several sequences against the packed forward of the training path."""

from __future__ import annotations

import pytest
import torch
from test_drafter import Case, make

from dflash_ext.drafting import Drafting

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def extend(drafting: Drafting, features, rows: list[int]) -> None:
    """Append features, each to the sequence that `rows` names."""
    lengths, places = list(drafting.lengths), []
    for row in rows:
        places.append(lengths[row])
        lengths[row] += 1
    counts = [rows.count(r) for r in range(len(lengths))]
    drafting.extend(features, torch.tensor(rows), torch.tensor(places), counts)


@pytest.mark.parametrize(
    "kinds", [("sliding_attention", "full_attention"), ("full_attention",) * 2]
)
def test_blocks_equal_the_packed_forward(kinds):
    """Blocks 1, 3, 4 of the case: anchors 5 of document 0, 3 and 10 of document 2. Row 5: mask."""
    drafter = make(layer_types=kinds)
    case = Case(drafter.config)
    out = case.run(drafter).view(5, 4, -1)
    drafting = Drafting(drafter, 2, 10, device="cpu", dtype=torch.float32)
    extend(drafting, case.features[[0, 1, 2, 3, 7]], [0] * 4 + [1])
    extend(drafting, case.features[[4, 8, 9]], [0, 1, 1])
    assert drafting.lengths == [5, 3]
    got = drafting.draft(case.embeds[[1, 3, 5]]).view(2, 4, -1)
    torch.testing.assert_close(got, out[[1, 3]], **CLOSE)

    drafting.select([1])
    extend(drafting, case.features[10:17], [0] * 7)
    torch.testing.assert_close(drafting.draft(case.embeds[[4, 5]]), out[4], **CLOSE)
    with pytest.raises(ValueError, match="of 10 rows cannot hold 11"):
        extend(drafting, case.features[:1], [0])

    drafting.reset(0)  # what the row held before is seen no more
    extend(drafting, case.features[:5], [0] * 5)
    torch.testing.assert_close(drafting.draft(case.embeds[[1, 5]]), out[1], **CLOSE)


def test_a_sequence_without_context_beside_one_with():
    drafter = make()
    case = Case(drafter.config)
    out = case.run(drafter).view(5, 4, -1)
    drafting = Drafting(drafter, 2, 6, device="cpu", dtype=torch.float32)
    extend(drafting, case.features[:5], [1] * 5)
    got = drafting.draft(case.embeds[[0, 1, 5]]).view(2, 4, -1)
    torch.testing.assert_close(got, out[[0, 1]], **CLOSE)
