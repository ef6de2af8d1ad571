from __future__ import annotations

import json
import os
import stat
import threading

import numpy as np
import pytest
import torch
from data_fixtures import THINKING, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ext.data.chat import prepare_jsonl
from dflash_ext.data.store import StoreWriter, TokenStore, cache_key, cached_store, split_indices
from dflash_ext.errors import UserError

SAMPLE = st.integers(1, 12).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n),
        st.lists(st.booleans(), min_size=n, max_size=n),
    )
)


def write(path, samples):
    with StoreWriter(path) as writer:
        for ids, mask in samples:
            writer.append(ids, mask)
    return TokenStore.open(path)


@settings(max_examples=40, deadline=None)
@given(st.lists(SAMPLE, min_size=1, max_size=8))
def test_what_is_written_is_read(tmp_path_factory, samples):
    store = write(tmp_path_factory.mktemp("s") / "store", samples)
    assert len(store) == len(samples)
    assert store.lengths.tolist() == [len(ids) for ids, _ in samples]
    naive = [sum(m[a] and m[a + 1] for a in range(len(m) - 1)) for _, m in samples]
    assert store.candidates.tolist() == naive
    assert store.lengths.dtype == store.candidates.dtype == np.int64
    for i, (ids, mask) in enumerate(samples):
        got_ids, got_mask = store.sample(i)
        assert (got_ids.tolist(), got_mask.tolist()) == (ids, mask)
        assert (got_ids.dtype, got_mask.dtype) == (torch.int64, torch.bool)


def test_batch_packs_whole_samples_in_the_order_asked(tmp_path):
    store = write(tmp_path / "s", [([1, 2], [0, 1]), ([3, 4, 5], [0, 1, 1]), ([6], [1])])
    batch = store.batch([2, 1])
    assert batch.input_ids.tolist() == [6, 3, 4, 5]
    assert batch.loss_mask.tolist() == [True, False, True, True]
    assert batch.doc_starts.tolist() == [0, 1, 4]
    assert batch.sample_ids == (2, 1)
    assert batch.positions().tolist() == [0, 0, 1, 2]
    assert store.prompt(1) == [3]


def test_wrong_samples_are_named(tmp_path):
    with pytest.raises(UserError, match="sample 1: 3 token ids but 2 mask values"):
        write(tmp_path / "s", [([1], [1]), ([1, 2, 3], [1, 1])])
    assert list(tmp_path.iterdir()) == []  # nothing left of the failed store
    with pytest.raises(UserError, match="sample 0: no tokens"):
        write(tmp_path / "s", [([], [])])
    store = write(tmp_path / "s", [([1], [1])])
    with pytest.raises(UserError, match=r"sample 1 of .* holds samples 0 to 0"):
        store.sample(1)


def test_a_store_appears_only_when_closed_and_is_never_overwritten(tmp_path):
    writer = StoreWriter(tmp_path / "s")
    writer.append([1, 2], [True, True])
    assert not (tmp_path / "s").exists()
    writer.close(info={"why": "test"})
    store = TokenStore.open(tmp_path / "s")
    assert store.info == {"why": "test"}
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700
    with pytest.raises(UserError, match="exists already"):
        StoreWriter(tmp_path / "s")


@pytest.mark.parametrize("name", ["tokens.i32", "mask.u8", "offsets.i64", "rows.i64"])
@pytest.mark.parametrize("damage", ["short", "flipped", "missing"])
def test_damage_is_found_at_open(tmp_path, name, damage):
    write(tmp_path / "s", [([1, 2, 3], [0, 1, 1]), ([4], [1])])
    file = tmp_path / "s" / name
    data = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "short":
        file.write_bytes(data[:-1])
    else:
        data[-1] ^= 1
        file.write_bytes(data)
    with pytest.raises(UserError, match=name):
        TokenStore.open(tmp_path / "s")


def test_index_is_checked(tmp_path):
    with pytest.raises(UserError, match="no token store"):
        TokenStore.open(tmp_path / "nowhere")
    write(tmp_path / "s", [([1, 2], [1, 1])])
    index = tmp_path / "s" / "index.json"
    good = json.loads(index.read_text())
    index.write_text(json.dumps({**good, "format": 99}))
    with pytest.raises(UserError, match="format 99"):
        TokenStore.open(tmp_path / "s")
    index.write_text("{")
    with pytest.raises(UserError, match="damaged"):
        TokenStore.open(tmp_path / "s")


def test_cached_store_builds_once_also_in_a_race(tmp_path):
    built = []

    def build(path):
        built.append(path)
        with StoreWriter(path) as writer:
            writer.append([1, 2], [True, True])

    def get(value):
        cached_store({"option": value}, build, root=tmp_path)

    threads = [threading.Thread(target=get, args=(1,)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    get(2)
    assert len(built) == 2


def test_cached_store_removes_what_a_killed_process_left(tmp_path):
    parts = {"option": 1}
    abandoned = tmp_path / f".{cache_key(parts)}-abc"
    abandoned.mkdir()

    def build(path):
        with StoreWriter(path) as writer:
            writer.append([1], [True])

    cached_store(parts, build, root=tmp_path)
    assert not abandoned.exists()


def test_a_failed_build_leaves_the_key_free(tmp_path):
    def fail(path):
        with StoreWriter(path) as writer:
            writer.append([1], [True])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_store({"option": 1}, fail, root=tmp_path)
    assert [p.name for p in tmp_path.iterdir() if not p.name.endswith(".lock")] == []


def test_split_is_a_partition():
    rows = np.arange(100)
    train, held = split_indices(rows, 7, seed=1)
    assert len(held) == 7
    assert sorted([*train, *held]) == list(range(100))
    assert held.tolist() == split_indices(rows, 7, seed=1)[1].tolist()
    assert held.tolist() != split_indices(rows, 7, seed=2)[1].tolist()
    with pytest.raises(UserError, match="held-out"):
        split_indices(np.arange(5), 5, seed=0)
    with pytest.raises(UserError, match="held-out rows of 1"):
        split_indices(np.zeros(5, dtype=np.int64), 1, seed=0)


def test_samples_of_one_row_never_straddle_the_split(tmp_path):
    sources = [3, 3, 3, 7, 8, 8, 8, 8, 11, 12, 12]
    with StoreWriter(tmp_path / "s") as writer:
        for row in sources:
            writer.append([1, 2], [True, True], row=row)
    store = TokenStore.open(tmp_path / "s")
    assert store.rows.tolist() == sources
    for seed in range(20):
        train, held = (set(store.rows[part]) for part in split_indices(store.rows, 2, seed=seed))
        assert len(held) == 2
        assert not train & held
        assert train | held == set(sources)
    assert write(tmp_path / "t", [([1], [1])] * 3).rows.tolist() == [0, 1, 2]


def test_a_fanned_out_conversation_is_one_row(tmp_path):
    """A template that drops earlier thoughts makes one sample of every turn."""
    turns = [("user", "a"), ("assistant", "one"), ("user", "b"), ("assistant", "two")]
    rows = [turns[:2], turns, turns[2:]]
    lines = [json.dumps({"messages": [{"role": r, "content": c} for r, c in t]}) for t in rows]
    (tmp_path / "d.jsonl").write_text("".join(f"{line}\n" for line in lines))
    tokenizer = make_tokenizer(THINKING)
    prepare_jsonl(tmp_path / "d.jsonl", tokenizer, tmp_path / "s", max_length=128)
    assert TokenStore.open(tmp_path / "s").rows.tolist() == [1, 2, 2, 3]


def test_identity_is_the_content_s(tmp_path):
    samples = [([1, 2, 3], [0, 1, 1]), ([4], [1])]
    first, copy = write(tmp_path / "a", samples), write(tmp_path / "b", samples)
    assert first.identity == copy.identity
    for i, sample in enumerate([([1, 2, 9], [0, 1, 1]), ([1, 2, 3], [1, 1, 1])]):
        other = write(tmp_path / str(i), [sample, samples[1]])
        assert other.identity != first.identity


def test_large_ids_and_maps_are_read_only(tmp_path):
    store = write(tmp_path / "s", [([2**31 - 1], [1])])
    assert store.sample(0)[0].tolist() == [2**31 - 1]
    ids, _ = store.sample(0)
    ids[0] = 5  # a copy: the file is untouched
    assert store.sample(0)[0].tolist() == [2**31 - 1]
    assert os.path.getsize(tmp_path / "s" / "tokens.i32") == 4
