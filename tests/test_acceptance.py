"""Counting of accepted lengths, slots, ranks and foretold mass, against counting by hand."""

from __future__ import annotations

import pytest

from dflash_ext.acceptance import RANKS, recall, summarise
from dflash_ext.generate import Generation


def generation(tokens, accepted, stopped=False, **recorded) -> Generation:
    return Generation(tokens, accepted, 0.5, stopped, **recorded)


def test_counts():
    runs = [generation(list(range(12)), [4, 1, 2, 4]), generation([1, 2, 3], [2], stopped=True)]
    reference = [generation(list(range(12)), []), generation([1, 2, 4], [])]
    report = summarise(runs, 4, reference)
    assert (report.prompts, report.tokens, report.steps, report.seconds) == (2, 15, 5, 1.0)
    assert report.accept_len == (4 + 1 + 2 + 4 + 2) / 5
    assert report.full_block_rate == 2 / 5
    # Slot 1: reached by all 5 steps, failed by the second. Slot 2: reached by four of them, but
    # the one cut by its stop token says nothing, and the third failed. Slot 3: passed twice.
    assert report.slot_acceptance == [4 / 5, 2 / 3, 1.0]
    assert report.identical == 1
    assert report.tokens_per_second == 15.0
    assert (report.expected, report.calibration, report.recall) == (None, None, {})


def test_counts_of_nothing():
    report = summarise([generation([7], [])], 4)
    assert (report.accept_len, report.steps, report.full_block_rate) == (1.0, 0, 0.0)
    assert report.slot_acceptance == [None, None, None]
    assert report.identical is None
    assert summarise([], 4).tokens_per_second == 0.0


def test_foretold_mass_of_whole_steps():
    """The step that its stop token cut says nothing about what would have been accepted."""
    runs = [
        generation([0] * 9, [4, 1], expected=[2.5, 0.5]),
        generation([0] * 5, [3, 1], stopped=True, expected=[1.0, 9.0]),
    ]
    report = summarise(runs, 4)
    assert report.expected == 1 + (2.5 + 0.5 + 1.0) / 3
    assert report.calibration == (3 + 0 + 2) / (2.5 + 0.5 + 1.0)


def test_recall_counts_every_slot_the_text_reaches():
    runs = [generation([], [1, 1], ranks=[[0, 3, 16], [1, 0]]), generation([], [1], ranks=[[5]])]
    found = recall(runs, 4)
    assert tuple(found) == RANKS == (1, 2, 4, 8, 16)
    assert found[1] == [1 / 3, 1 / 2, 0.0]
    assert found[2] == [2 / 3, 1 / 2, 0.0]
    assert found[4] == [2 / 3, 1.0, 0.0]
    assert found[8] == found[16] == [1.0, 1.0, 0.0]
    assert recall([generation([], [1], ranks=[[0]])], 4)[1] == [1.0, None, None]
    assert recall([generation([], [])], 4) == {}
    assert summarise(runs, 4).to_json()["recall"]["8"] == pytest.approx([1.0, 1.0, 0.0])
