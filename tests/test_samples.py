"""The data a run is given: stores that fit its target, and nothing both trained on and held out."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import pytest
from data_fixtures import LLAMA3, make_tokenizer
from prepare_cases import GOOD, OPTIONS, chat, make, save_target, write
from ranks import run_config

from dflash_ext.data.prepared import prepare
from dflash_ext.data.store import TokenStore
from dflash_ext.data.templates import load_tokenizer
from dflash_ext.errors import UserError
from dflash_ext.monitor import Monitor
from dflash_ext.samples import apart, as_begun, prepare_files


@pytest.fixture
def given(tmp_path, monkeypatch):
    """given(train, validation) -> (training samples, held-out samples, what was said)."""
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    target = save_target(tmp_path / "target")

    def give(train, validation=None, target=target, **changes):
        config = run_config(tmp_path, tmp_path, batch={"token_budget": 200})
        data = dataclasses.replace(
            config.data, train=str(train), validation=validation, held_out=2, max_length=128
        )
        config = dataclasses.replace(config, data=dataclasses.replace(data, **changes))
        stream = io.StringIO()
        return *prepare_files(config, target, Monitor(None, stream=stream)), stream.getvalue()

    return give


def test_a_store_of_another_target_or_length_is_refused(tmp_path, given):
    make(tmp_path / "s", write(tmp_path / "d.jsonl", GOOD))
    train, held, said = given(tmp_path / "s")
    assert (len(train.indices), len(held.indices)) == (7, 2)
    assert "9 samples" in said
    longest = train.store.lengths.max()
    with pytest.raises(UserError, match=f"a sample of {longest} tokens, max_length is 2"):
        given(tmp_path / "s", max_length=2)
    make_tokenizer(LLAMA3).save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="prepared with another template than the target's"):
        given(tmp_path / "s", target=str(tmp_path / "other"))
    (tmp_path / "s" / "index.json").unlink()
    with pytest.raises(UserError, match=r"no token store at .*: it has no index\.json"):
        given(tmp_path / "s")


def test_folders_and_globs_are_data_as_in_prepare(tmp_path, given):
    (tmp_path / "chats").mkdir()
    write(tmp_path / "chats" / "a.jsonl", GOOD[:5])
    write(tmp_path / "chats" / "b.jsonl", GOOD[5:])
    for name in ("chats", "chats/*.jsonl"):
        train, held, said = given(tmp_path / name)
        assert len(train.indices) + len(held.indices) == 9
        assert "9 rows: 9 trained" in said


def test_a_row_of_both_files_is_held_out_and_said(tmp_path, given):
    more = [GOOD[i] for i in (1, 4)]
    train = write(tmp_path / "t.jsonl", GOOD)
    other = write(tmp_path / "v.jsonl", [more[0], chat("new", "row"), {**more[1], "id": 7}])
    train_set, held, said = given(train, other)
    assert train_set.indices.tolist() == [0, 2, 3, 5, 6, 7, 8]
    assert held.indices.tolist() == [0, 1, 2]
    assert "2 samples of" in said
    assert "not trained on" in said
    assert "not trained on" not in given(train, write(tmp_path / "w.jsonl", [chat("x", "y")]))[2]
    with pytest.raises(UserError, match="leaves nothing to train on"):
        given(write(tmp_path / "u.jsonl", more), other)


def test_rows_held_out_elsewhere_stay_so_when_the_store_grows(tmp_path):
    tokenizer = load_tokenizer(save_target(tmp_path / "target"), trust_remote_code=False)

    def extend(name, rows):
        source = write(tmp_path / f"{name}.jsonl", rows)
        prepare([source], tokenizer, tmp_path / name, OPTIONS, workers=1)
        return TokenStore.open(tmp_path / name)

    first, other = extend("s", GOOD[:4]), extend("v", [GOOD[1], GOOD[6]])
    before = apart(first, other)
    longer, later = extend("s", GOOD), extend("v", [GOOD[1], GOOD[6], GOOD[2]])
    config = run_config(tmp_path, tmp_path)
    now = as_begun(config, apart(longer, later), [first.identity, longer.identity], other.identity)
    assert before[0].indices.tolist() == [0, 2, 3]
    assert now[0].indices.tolist() == [0, 2, 3, 4, 5, 7, 8]  # in their places, new ones behind
    assert np.array_equal(now[1].indices, before[1].indices)
