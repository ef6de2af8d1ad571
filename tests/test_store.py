from __future__ import annotations

import json
import multiprocessing
import os
import stat
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ext.data import store_files
from dflash_ext.data.store import StoreWriter, TokenStore, cache_key, cached_store, split_indices
from dflash_ext.data.store_files import FILES, content_key
from dflash_ext.errors import UserError

SAMPLE = st.integers(1, 12).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n),
        st.lists(st.booleans(), min_size=n, max_size=n),
    )
)
TWO = [([1, 2, 3], [0, 1, 1]), ([4], [1])]


def write(path, samples):
    with StoreWriter(path) as writer:
        for ids, mask in samples:
            writer.append(ids, mask)
    return TokenStore.open(path)


def content(store):
    return [tuple(part.tolist() for part in store.sample(i)) for i in range(len(store))]


@settings(max_examples=30)
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


@settings(max_examples=25)
@given(st.lists(SAMPLE, min_size=1, max_size=8), st.data())
def test_a_store_written_in_pieces_is_the_same_store(tmp_path_factory, samples, data):
    """Commits, extensions and what a killed writer left behind its last commit do not show."""
    folder = tmp_path_factory.mktemp("s")
    whole = write(folder / "whole", samples)
    path = folder / "pieces"
    left = list(samples)
    for _ in range(len(samples) + 3):
        writer = StoreWriter(path, extend=True)
        for _ in range(data.draw(st.integers(0, len(left)))):
            writer.append(*left.pop(0))
        writer.commit(complete=not left or (writer.samples > 0 and data.draw(st.booleans())))
        if data.draw(st.booleans()):
            writer.append([7, 7, 7], [True, True, True])
            for file in writer._files.values():
                file.flush()  # on disk, but never committed
        writer.release()
    with StoreWriter(path, extend=True) as writer:
        for sample in left:
            writer.append(*sample)
    store = TokenStore.open(path)
    assert content(store) == content(whole)
    assert (store.identity, store.rows.tolist()) == (whole.identity, whole.rows.tolist())
    assert store.keys.tolist() == whole.keys.tolist()


def test_append_many_is_append_often(tmp_path):
    one = write(tmp_path / "one", TWO)
    with StoreWriter(tmp_path / "many") as writer:
        writer.append_many(
            np.array([1, 2, 3, 4], dtype=np.int32),
            np.array([False, True, True, True]),
            np.array([3, 1]),
            rows=np.array([0, 1]),
            keys=one.keys,
        )
        empty = np.zeros(0, dtype=np.int64)
        writer.append_many(empty, empty.astype(bool), empty, rows=empty, keys=empty)
    many = TokenStore.open(tmp_path / "many")
    assert many.identity == one.identity
    assert many.candidates.tolist() == one.candidates.tolist() == [1, 0]


def test_batch_packs_whole_samples_in_the_order_asked(tmp_path):
    store = write(tmp_path / "s", [([1, 2], [0, 1]), ([3, 4, 5], [0, 1, 1]), ([6], [1])])
    batch = store.batch([2, 1])
    assert batch.input_ids.tolist() == [6, 3, 4, 5]
    assert batch.loss_mask.tolist() == [True, False, True, True]
    assert batch.doc_starts.tolist() == [0, 1, 4]
    assert batch.sample_ids == (2, 1)
    assert batch.positions().tolist() == [0, 0, 1, 2]
    assert (batch.input_ids.dtype, batch.doc_starts.dtype) == (torch.int64, torch.int64)
    assert store.prompt(1) == [3]
    with pytest.raises(UserError, match="sample 3"):
        store.batch([0, 3])


def test_wrong_samples_are_named(tmp_path):
    with pytest.raises(UserError, match="sample 1: 3 token ids but 2 mask values"):
        write(tmp_path / "s", [([1], [1]), ([1, 2, 3], [1, 1])])
    assert list(tmp_path.iterdir()) == []  # nothing left of the failed store
    with pytest.raises(UserError, match="sample 0: no tokens"):
        write(tmp_path / "s", [([], [])])
    for wrong in (-1, 2**31):
        with pytest.raises(UserError, match=r"sample 0: token ids must be from 0 to 2\*\*31 - 1"):
            write(tmp_path / "s", [([5, wrong], [1, 1])])
    store = write(tmp_path / "s", [([1], [1])])
    with pytest.raises(UserError, match=r"sample 1 of .* holds samples 0 to 0"):
        store.sample(1)


def test_a_store_opens_only_when_closed_and_is_never_overwritten(tmp_path):
    writer = StoreWriter(tmp_path / "s")
    writer.append([1, 2], [True, True])
    writer.commit()
    with pytest.raises(UserError, match=r"was never finished .*it continues"):
        TokenStore.open(tmp_path / "s")
    writer.close(info={"why": "test"})
    store = TokenStore.open(tmp_path / "s")
    assert store.info == {"why": "test"}
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700
    with pytest.raises(UserError, match="exists already"):
        StoreWriter(tmp_path / "s")


def test_a_folder_that_is_no_store_is_left_alone(tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("mine")
    for extend in (False, True):
        with pytest.raises(UserError, match=r"exists already|is no token store and not empty"):
            StoreWriter(tmp_path / "letters", extend=extend)
    assert (tmp_path / "letters" / "dear.txt").read_text() == "mine"


def test_one_writer_at_a_time(tmp_path):
    first = StoreWriter(tmp_path / "s")
    with pytest.raises(UserError, match="is being written by another process"):
        StoreWriter(tmp_path / "s", extend=True)
    first.append([1], [True])
    first.close()
    StoreWriter(tmp_path / "s", extend=True).close()


def test_an_extended_store_keeps_its_samples_and_knows_its_former_self(tmp_path):
    first = write(tmp_path / "s", TWO)
    extended = [*TWO, ([5, 6], [1, 1])]
    with StoreWriter(tmp_path / "s", extend=True) as writer:
        writer.append(*extended[2])
        # While it is being extended a reader sees what was complete, and keeps its view after.
        assert TokenStore.open(tmp_path / "s").identity == first.identity
    store = TokenStore.open(tmp_path / "s")
    assert content(first) == content(store)[:2]
    assert (store.prefix(first.identity), store.prefix(store.identity)) == (2, 3)
    assert store.prefix("another") is None
    former = store.as_of(first.identity)
    assert (former.identity, content(former)) == (first.identity, content(first))
    for name in ("rows", "keys", "lengths", "candidates"):
        assert getattr(former, name).tolist() == getattr(first, name).tolist()
    assert (former.prefix(first.identity), former.batch([1]).input_ids.tolist()) == (2, [4])
    with pytest.raises(UserError, match="sample 2"):
        former.sample(2)
    with pytest.raises(UserError, match="never was what the run began on"):
        store.as_of("another")
    assert store.identity == write(tmp_path / "copy", extended).identity
    assert store.identity != first.identity


def test_an_extension_that_fails_leaves_the_store_as_it_was(tmp_path):
    first = write(tmp_path / "s", TWO)

    def fail():
        with StoreWriter(tmp_path / "s", extend=True) as writer:
            writer.append([9], [True])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    again = TokenStore.open(tmp_path / "s")
    assert (again.identity, content(again)) == (first.identity, content(first))


def test_other_settings_do_not_mix(tmp_path):
    made = {"tokenizer": "a" * 64, "options": {"max_length": 4, "supervise": "all"}}
    StoreWriter(tmp_path / "s", settings=made).close()
    now = {"tokenizer": "b" * 64, "options": {"max_length": 8, "supervise": "all"}}
    wanted = r"max_length 4, now 8, another tokenizer"
    with pytest.raises(UserError, match=wanted):
        StoreWriter(tmp_path / "s", settings=now, extend=True)
    StoreWriter(tmp_path / "s", settings=made, extend=True).close()


def test_log_of_rows(tmp_path):
    with StoreWriter(tmp_path / "s") as writer:
        writer.append([1], [True], row=2)
        writer.log_rows(np.array([11, 2**64 - 1], dtype=np.uint64), np.array([3, 0]))
    writer = StoreWriter(tmp_path / "s", extend=True)
    keys, outcomes = writer.logged()
    assert (writer.rows, keys.tolist(), outcomes.tolist()) == (2, [11, 2**64 - 1], [3, 0])
    assert writer.keys().tolist() == [content_key([(np.array([1]), np.array([True]))])]
    writer.close()


def write_for_ever(path, committed):
    writer = StoreWriter(path, extend=True)
    for i in range(10**9):
        writer.append([i, i + 1], [True, True])
        if i % 100 == 99:
            writer.commit()
            committed.send(i + 1)


def test_a_killed_writer_loses_nothing_it_committed(tmp_path):
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=write_for_ever, args=(tmp_path / "s", theirs))
    process.start()
    committed = [ours.recv() for _ in range(3)][-1]
    process.kill()
    process.join()
    with StoreWriter(tmp_path / "s", extend=True) as writer:
        kept = writer.samples
        assert kept >= committed
        writer.append([5], [True])
    store = TokenStore.open(tmp_path / "s")
    assert content(store)[:-1] == [([i, i + 1], [True, True]) for i in range(kept)]
    assert content(store)[-1] == ([5], [True])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["short", "flipped", "missing"])
def test_damage_is_found_at_open(tmp_path, name, damage):
    with StoreWriter(tmp_path / "s") as writer:
        for ids, mask in TWO:
            writer.append(ids, mask)
        writer.log_rows(np.array([1, 2], dtype=np.uint64), np.array([0, 0]))
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


def test_a_large_file_is_verified_when_it_changed_or_when_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(store_files, "_ALWAYS_VERIFIED", 0)
    write(tmp_path / "s", TWO)
    tokens = tmp_path / "s" / "tokens.i32"
    times = tokens.stat().st_atime_ns, tokens.stat().st_mtime_ns
    data = bytearray(tokens.read_bytes())
    data[0] ^= 1
    tokens.write_bytes(data)
    with pytest.raises(UserError, match=r"tokens\.i32 fails its checksum"):
        TokenStore.open(tmp_path / "s")
    os.utime(tokens, ns=times)  # as a disk's own fault would be: no write, no new time
    TokenStore.open(tmp_path / "s")
    with pytest.raises(UserError, match=r"tokens\.i32 fails its checksum"):
        TokenStore.open(tmp_path / "s", verify=True)


def test_index_is_checked(tmp_path):
    with pytest.raises(UserError, match="no token store"):
        TokenStore.open(tmp_path / "nowhere")
    write(tmp_path / "s", [([1, 2], [1, 1])])
    index = tmp_path / "s" / "index.json"
    good = json.loads(index.read_text())
    index.write_text(json.dumps({**good, "format": 99}))
    with pytest.raises(UserError, match="format 99"):
        TokenStore.open(tmp_path / "s")
    damaged = ["{", "[]", "null", '{"format": 4}', json.dumps({**good, "committed": {}})]
    damaged.append(json.dumps({**good, "complete": {**good["complete"], "samples": "x"}}))
    for text in damaged:
        index.write_text(text)
        with pytest.raises(UserError, match=r"index\.json is damaged"):
            TokenStore.open(tmp_path / "s")


def test_any_changed_bit_of_the_index_is_found(tmp_path):
    """Also one of a digit, which leaves it an index: of the report, say."""
    with StoreWriter(tmp_path / "s") as writer:
        writer.append([1, 2], [1, 1])
        writer.close({"report": {"rows": 12345}})
    index = tmp_path / "s" / "index.json"
    good = index.read_bytes()
    for place in range(0, len(good), 3):
        index.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(UserError, match=r"index\.json is damaged|has store format"):
            TokenStore.open(tmp_path / "s")


def test_a_writer_killed_before_its_first_commit_is_in_nobodys_way(tmp_path):
    begun = write(tmp_path / "t", TWO).path
    (begun / "index.json").unlink()
    with pytest.raises(UserError, match="is no token store and not empty"):
        StoreWriter(begun, extend=True)  # there may be work in it
    (begun / "verified.json").unlink()
    for file in begun.iterdir():
        file.write_bytes(b"\0" * 8 if file.name == "offsets.i64" else b"")
    (begun / ".index.json.17").write_text('{"form')
    with StoreWriter(begun, extend=True) as writer:
        for sample in TWO:
            writer.append(*sample)
    assert content(TokenStore.open(begun)) == content(write(tmp_path / "s", TWO))
    assert not list(begun.glob(".*"))


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


def test_cached_store_builds_again_what_a_killed_process_left(tmp_path):
    parts = {"option": 1}
    writer = StoreWriter(tmp_path / cache_key(parts))
    writer.append([9, 9], [True, True])
    writer.commit()
    writer.release()

    def build(path):
        with StoreWriter(path) as writer:
            writer.append([1], [True])

    assert content(cached_store(parts, build, root=tmp_path)) == [([1], [True])]


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


@settings(max_examples=60)
@given(st.lists(st.integers(0, 2**64 - 1), min_size=4, max_size=60), st.integers(0, 9), st.data())
def test_added_rows_never_move_a_trained_one_to_the_held_out(keys, seed, data):
    keys = np.array(keys, dtype=np.uint64)
    before = data.draw(st.integers(2, len(keys)))
    held_out = data.draw(st.integers(0, len(np.unique(keys[:before])) - 1))
    trained = set(keys[split_indices(keys[:before], held_out, seed=seed)[0]].tolist())
    train, held = split_indices(keys, held_out, seed=seed)
    held_keys = set(keys[held].tolist())
    assert len(held_keys) == held_out
    assert not trained & held_keys
    assert not set(keys[train].tolist()) & held_keys
    # Of content alone: in another order the same rows are held out.
    order = np.array(data.draw(st.permutations(range(len(keys)))))
    shuffled = keys[order]
    assert set(shuffled[split_indices(shuffled, held_out, seed=seed)[1]].tolist()) == held_keys


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


def test_identity_is_the_content_s(tmp_path):
    first, copy = write(tmp_path / "a", TWO), write(tmp_path / "b", TWO)
    assert first.identity == copy.identity
    for i, sample in enumerate([([1, 2, 9], [0, 1, 1]), ([1, 2, 3], [1, 1, 1])]):
        other = write(tmp_path / str(i), [sample, TWO[1]])
        assert other.identity != first.identity


def test_large_ids_and_maps_are_read_only(tmp_path):
    store = write(tmp_path / "s", [([2**31 - 1], [1])])
    assert store.sample(0)[0].tolist() == [2**31 - 1]
    ids, _ = store.sample(0)
    ids[0] = 5  # a copy: the file is untouched
    assert store.sample(0)[0].tolist() == [2**31 - 1]
    assert os.path.getsize(tmp_path / "s" / "tokens.i32") == 4
