"""`python -m dflash_ext.prepare`: every row has one outcome, and nothing is done twice."""

from __future__ import annotations

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_fixtures import CHATML, LLAMA3, MISTRAL, THINKING, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ext import prepare as command
from dflash_ext.data import blocks, encode, prepared
from dflash_ext.data.ledger import DUPLICATE, KNOWN, NEW, Ledger
from dflash_ext.data.prepared import DUPLICATE_REASON, prepare, prepared_store
from dflash_ext.data.rows import ChatOptions
from dflash_ext.data.store import StoreWriter, TokenStore
from dflash_ext.errors import UserError

ROOT = Path(__file__).parents[1]
TOKENIZER = make_tokenizer(CHATML)
OPTIONS = ChatOptions(max_length=128)


def chat(*turns, **more):
    roles = ("user", "assistant") * len(turns)
    return {"messages": [{"role": r, "content": t} for r, t in zip(roles, turns)], **more}


def write(path, rows):
    """JSON lines; a bytes row is written as it is."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return str(path)


def make(path, *sources, tokenizer=TOKENIZER, options=OPTIONS, workers=1, **more):
    report = prepare(sources, tokenizer, path, options, workers=workers, **more)
    assert report.rows == report.trained + sum(report.skipped.values())
    assert set(report.skipped) == set(report.examples)
    return TokenStore.open(path), report


def texts(store):
    return [TOKENIZER.decode(store.sample(i)[0][store.sample(i)[1]]) for i in range(len(store))]


GOOD = [chat(f"question {i}", f"answer {i}") for i in range(9)]
BAD = {
    b"{": "not JSON",
    b'{"messages": NaN': "not JSON",
    b"\xff\xfe{}": "not UTF-8",
    b"[" * 50_000: "not JSON",
    b"null": None,
    b"3": None,
    b"[]": None,
    b"{}": None,
    b'{"messages": null}': None,
    b'{"messages": []}': None,
    b'{"messages": {"role": "user"}}': None,
    b'{"messages": [{"role": "user", "content": "q"}, {"role": "assistant"}]}': None,
    b'{"messages": [{"role": "user", "content": null}, {"role": "assistant"}]}': None,
    b'{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": 7}]}': None,
    b'{"prompt": "\\ud83d", "completion": "a"}': None,
    b'{"text": null}': None,
    b'{"text": ""}': None,
    b'{"text": 5}': None,
    b'{"ids": [1, 2, 3], "mask": [1, 1]}': None,
    b'{"ids": [1, 999999, 3], "mask": [1, 1, 1]}': None,
    b'{"ids": [1, -1, 3], "mask": [1, 1, 1]}': None,
    b'{"ids": [1, 1e400, 3], "mask": [1, 1, 1]}': None,
    b'{"ids": "x", "mask": [1, 1, 1]}': None,
    b'{"prompt": "q", "completion": null}': None,
    b'{"conversations": "x"}': None,
}


@pytest.mark.parametrize("row", BAD, ids=range(len(BAD)))
def test_a_bad_row_alone_and_among_good_ones(tmp_path, row):
    """Requirement 1."""
    store, report = make(tmp_path / "s", write(tmp_path / "d.jsonl", [*GOOD[:4], row, *GOOD[4:]]))
    assert (report.rows, report.trained, sum(report.skipped.values())) == (10, 9, 1)
    (reason,) = report.skipped
    assert BAD[row] in (None, reason)
    assert report.examples[reason][0].startswith(f"{tmp_path / 'd.jsonl'} row 5")
    assert store.rows.tolist() == [1, 2, 3, 4, 6, 7, 8, 9, 10]
    with pytest.raises(UserError, match=rf"0 trainable rows of 1 in .*skipped: 1 {reason}"):
        make(tmp_path / "t", write(tmp_path / "e.jsonl", [row]))
    assert not (tmp_path / "t").exists()


def test_seven_bad_rows_have_seven_outcomes(tmp_path):
    messages = [
        [],
        [{"role": "assistant", "content": "a"}],
        [{"role": "system", "content": "s"}],
        [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
        [{"role": "robot", "content": "a"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}],
    ]
    rows = [*GOOD, *({"messages": m} for m in messages)]
    _, report = make(tmp_path / "s", write(tmp_path / "d.jsonl", rows))
    assert (report.rows, report.trained) == (16, 9)
    assert list(report.skipped.values()) == [1] * 7
    assert "16 rows: 9 trained" in str(report)
    assert all(reason in str(report) for reason in report.skipped)


def test_duplicates_are_trained_once(tmp_path):
    """Of the same text, of other text with the same tokens; an `id` makes no row another one."""
    rows = [GOOD[0], GOOD[1], GOOD[0], {**GOOD[1], "id": 5}, {**GOOD[2], "id": 5}, GOOD[0]]
    rows += [b"{", b"{"]
    store, report = make(tmp_path / "s", write(tmp_path / "d.jsonl", rows))
    assert texts(store) == [f"answer {i}<|im_end|>" for i in range(3)]
    assert report.skipped == {DUPLICATE_REASON: 4, "not JSON": 1}
    assert report.examples[DUPLICATE_REASON] == [
        f"{tmp_path}/d.jsonl row 3: the same text",
        f"{tmp_path}/d.jsonl row 4: the same tokens",
        f"{tmp_path}/d.jsonl row 6: the same text",
    ]


def test_extending_encodes_only_what_is_new(tmp_path, monkeypatch):
    source = write(tmp_path / "d.jsonl", [*GOOD[:5], b"{", GOOD[0]])
    first, _ = make(tmp_path / "s", source)
    identity = first.identity
    encoded = []
    real = encode.RowEncoder.encode
    monkeypatch.setattr(
        encode.RowEncoder, "encode", lambda self, rows: encoded.extend(rows) or real(self, rows)
    )
    again, report = make(tmp_path / "s", source)
    assert (encoded, report.rows, again.identity) == ([], 7, identity)
    # The file grew, a second one came: in front, with rows that are known, and one of another kind.
    write(tmp_path / "d.jsonl", [*GOOD[:5], b"{", GOOD[0], *GOOD[5:7]])
    pq.write_table(pa.Table.from_pylist([GOOD[7], GOOD[8]]), tmp_path / "a.parquet")
    more, report = make(tmp_path / "s", str(tmp_path / "a.parquet"), source)
    assert [row["messages"] for row in encoded] == [GOOD[i]["messages"] for i in (7, 8, 5, 6)]
    assert (report.rows, report.trained) == (11, 9)
    assert more.prefix(identity) == 5
    assert texts(more)[:5] == texts(first)
    spaced = json.dumps(GOOD[8], indent=None, separators=(" ,", " :")).encode()
    _, report = make(tmp_path / "s", write(tmp_path / "new.jsonl", [spaced, chat("x", "yes")]))
    assert (report.rows, report.trained) == (13, 10)  # a lone new file is enough
    assert report.skipped[DUPLICATE_REASON] == 2  # GOOD[0], and now other text of the same tokens


def test_order_and_place_of_rows_do_not_matter_for_what_is_known(tmp_path):
    make(tmp_path / "s", write(tmp_path / "a.jsonl", GOOD))
    _, report = make(tmp_path / "s", write(tmp_path / "b.jsonl", GOOD[::-1]))
    assert (report.rows, report.trained) == (9, 9)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=12), st.integers(0, 12), st.integers(1, 4))
def test_a_ledger_finds_exactly_the_occurrences_it_has_not_seen(keys, before, step):
    """However reading is cut into calls, a row is new once and a duplicate after that."""
    logged = np.array(keys[:before], dtype=np.uint64)
    ledger = Ledger(logged, np.zeros(0, dtype=np.uint64))
    found = []
    for i in range(0, len(keys), step):
        found += ledger.classify(np.array(keys[i : i + step], dtype=np.uint64))
    expected = [KNOWN] * min(before, len(keys))
    for i in range(before, len(keys)):
        expected.append(DUPLICATE if keys[i] in keys[:i] else NEW)
    assert found == expected


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupted_prepare_continues(tmp_path, workers, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 4)
    rows = [chat(f"q {i}", f"a {i}") for i in range(40)] + [GOOD[0], GOOD[0], b"{"]
    rows[7] = rows[3]
    source = write(tmp_path / "d.jsonl", rows)
    whole, report = make(tmp_path / "whole", source)

    def stop(state):
        if state.rows >= 12:
            raise KeyboardInterrupt

    interruptions = 0
    while True:
        try:
            store, continued = make(tmp_path / "s", source, workers=workers, progress=stop)
            break
        except KeyboardInterrupt:
            interruptions += 1
            with pytest.raises(UserError, match=r"was never finished \(\d+ rows are done\)"):
                TokenStore.open(tmp_path / "s")
    assert interruptions == 3  # 12 rows each time, and then the last 7
    assert continued == report
    assert store.identity == whole.identity


@pytest.mark.parametrize("method", ["append_many", "log_rows", "commit"])
@pytest.mark.parametrize("when", [1, 2, 3])
def test_an_interruption_in_the_middle_of_a_batch(tmp_path, method, when, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 3)
    source = write(tmp_path / "d.jsonl", [*GOOD, b"{", GOOD[0], chat("x", "y")])
    whole, report = make(tmp_path / "whole", source)
    real, calls = getattr(StoreWriter, method), 0

    def stop(self, *args, **options):
        nonlocal calls
        calls += 1
        if calls == when + (method == "commit"):  # the first makes the store
            raise KeyboardInterrupt
        return real(self, *args, **options)

    monkeypatch.setattr(StoreWriter, method, stop)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "s", source, commit_seconds=0.0)
    store, continued = make(tmp_path / "s", source)
    assert (store.identity, continued) == (whole.identity, report)


def test_workers_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 3)
    rows = [x for i, row in enumerate(GOOD) for x in (row, list(BAD)[i])]
    source = write(tmp_path / "d.jsonl", rows)
    one, alone = make(tmp_path / "one", source)
    two, shared = make(tmp_path / "two", source, workers=2)
    assert (one.identity, alone) == (two.identity, shared)


@pytest.mark.parametrize("workers", [1, 2])
def test_damage_keeps_the_rows_before_it(tmp_path, workers, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 100)
    rows = [chat(f"q {i}", os.urandom(20).hex()) for i in range(3000)]
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = tmp_path / "d.jsonl.gz"
    path.write_bytes(gzip.compress(data)[:-5000])
    with pytest.raises(UserError, match=r"gz is damaged or cut short after row \d+") as caught:
        make(tmp_path / "s", str(path), workers=workers)
    read = int(str(caught.value).split("after row ")[1].split()[0])
    with pytest.raises(UserError, match=rf"was never finished \({read} rows are done\)"):
        TokenStore.open(tmp_path / "s")
    path.write_bytes(gzip.compress(data))
    store, report = make(tmp_path / "s", str(path))
    assert (len(store), report.rows) == (3000, 3000)


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 3)
    source = write(tmp_path / "d.jsonl", GOOD)
    real, calls = os.fsync, 0

    def full(descriptor):
        nonlocal calls
        calls += 1
        if calls > 24:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"cannot write .*: No space left on device"):
        make(tmp_path / "s", source, commit_seconds=0.0)
    monkeypatch.setattr(os, "fsync", real)
    with pytest.raises(UserError, match=r"was never finished \([36] rows are done\)"):
        TokenStore.open(tmp_path / "s")
    store, report = make(tmp_path / "s", source)
    assert (len(store), report.rows) == (9, 9)


def test_empty_files_and_nothing_to_train(tmp_path):
    for name in ("d.jsonl", "d.json"):
        (tmp_path / name).write_text("")
        with pytest.raises(UserError, match=rf"0 trainable rows of 0 in .*{name}; expected rows"):
            make(tmp_path / "s", str(tmp_path / name))
    _, report = make(tmp_path / "s", str(tmp_path / "d.json"), write(tmp_path / "e.jsonl", GOOD))
    assert report.rows == 9


def test_what_was_cut_is_counted(tmp_path):
    long, turns = chat("q", "word " * 400), chat("a", "first", "b", "word " * 400)
    _, report = make(tmp_path / "s", write(tmp_path / "d.jsonl", [GOOD[0], long, turns]))
    assert (report.trained, report.cut) == (3, {"answer": 1, "turns": 1})
    whole = sum(
        len(TOKENIZER(text, add_special_tokens=False).input_ids)
        for text in (
            TOKENIZER.apply_chat_template(row["messages"], tokenize=False)
            for row in (GOOD[0], long, turns)
        )
    )
    assert report.tokens + report.cut_tokens == whole
    assert report.cut_turns == 1
    assert "1 whole answers left out" in str(report)


def test_sampling_settings_are_kept(tmp_path):
    how = {"temperature": 1.0, "model": "m"}
    rows = [
        GOOD[0],
        {**GOOD[1], "sampling": how},
        {**GOOD[2], "sampling": dict(reversed(how.items()))},
    ]
    rows += [{**GOOD[3], "sampling": None}, {**GOOD[4], "sampling": 7}]
    store, report = make(tmp_path / "s", write(tmp_path / "d.jsonl", rows))
    assert report.sampling == ["7", '{"model": "m", "temperature": 1.0}']
    assert store.info["report"]["sampling"] == report.sampling
    many = [{**chat(f"q {i}", "a"), "sampling": {"seed": i}} for i in range(30)]
    _, report = make(tmp_path / "s", write(tmp_path / "e.jsonl", many))
    assert len(report.sampling) == 8


def test_a_fanned_out_conversation_is_one_row(tmp_path):
    """A template that drops earlier thoughts makes one sample of every turn."""
    rows = [chat("a", "one"), chat("a", "one", "b", "two"), chat("b", "two")]
    store, report = make(
        tmp_path / "s", write(tmp_path / "d.jsonl", rows), tokenizer=make_tokenizer(THINKING)
    )
    assert store.rows.tolist() == [1, 2, 2, 3]
    assert store.keys[1] == store.keys[2]
    assert len(set(store.keys.tolist())) == 3
    assert (report.trained, report.samples) == (3, 4)


def test_another_way_of_making_samples_needs_another_store(tmp_path):
    """Requirement 4, for a store with a name; `prepared_store` has it in the name."""
    source = write(tmp_path / "d.jsonl", GOOD)
    make(tmp_path / "s", source)
    others = {
        "max_length 128, now 64": {"options": ChatOptions(max_length=64)},
        "supervise all, now last": {"options": ChatOptions(max_length=128, supervise="last")},
        "another template": {"tokenizer": make_tokenizer(LLAMA3)},
    }
    for message, other in others.items():
        with pytest.raises(UserError, match=f"was prepared otherwise .*{message}"):
            make(tmp_path / "s", source, **other)
    with pytest.raises(UserError, match="max_length 1"):
        make(tmp_path / "s", source, options=ChatOptions(max_length=1))


def test_cache_key_covers_what_changes_the_result(tmp_path, monkeypatch):
    data, changed = write(tmp_path / "d.jsonl", GOOD), make_tokenizer(CHATML)
    changed.add_tokens(["question"])

    def path(data=data, tokenizer=TOKENIZER, **options):
        options = {"max_length": 64, **options}
        store, report = prepared_store(data, tokenizer, root=tmp_path / "cache", **options)
        assert report.samples == len(store)
        return store.path

    paths = [
        path(),
        path(data=write(tmp_path / "e.jsonl", GOOD[1:])),
        path(tokenizer=changed),
        path(tokenizer=make_tokenizer(LLAMA3)),
        path(max_length=65),
    ]
    assert path() == paths[0]
    assert path(data=write(tmp_path / "copy.jsonl", GOOD)) == paths[0]  # bytes, not names
    monkeypatch.setattr(prepared, "code_version", lambda *files: "another")
    paths.append(path())
    assert len(set(paths)) == len(paths)


def test_a_prepared_store_is_data_for_a_run(tmp_path):
    made, report = make(tmp_path / "s", write(tmp_path / "d.jsonl", GOOD))
    store, again = prepared_store(tmp_path / "s", TOKENIZER, max_length=128)
    assert (store.identity, again) == (made.identity, report)
    longest = int(made.lengths.max())
    prepared_store(tmp_path / "s", TOKENIZER, max_length=longest)
    with pytest.raises(UserError, match=rf"a sample of {longest} tokens, max_length is"):
        prepared_store(tmp_path / "s", TOKENIZER, max_length=longest - 1)
    with pytest.raises(UserError, match="prepared with another template than the target's"):
        prepared_store(tmp_path / "s", make_tokenizer(LLAMA3), max_length=128)


def test_a_file_that_cannot_be_read(tmp_path):
    for name, message in (("none.jsonl", "No such file"), ("x.jsonl", "Input/output error")):
        if name == "x.jsonl":
            (tmp_path / name).symlink_to("/proc/self/mem")  # opens, does not read
        with pytest.raises(UserError, match=rf"cannot read .*{name}: {message}"):
            prepared_store(tmp_path / name, TOKENIZER, max_length=64, root=tmp_path / "cache")


def test_system_message_with_a_template_that_refuses_it(tmp_path):
    row = {"messages": [{"role": "system", "content": "s"}, *GOOD[1]["messages"]]}
    source = write(tmp_path / "d.jsonl", [row, GOOD[0]])
    _, report = make(tmp_path / "s", source, tokenizer=make_tokenizer(MISTRAL))
    assert report.skipped == {"template refused the conversation": 1}
    assert "only user and assistant roles" in str(report)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(list(BAD)),
            st.sampled_from([json.dumps(row).encode() for row in GOOD]),
            st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"")),
        ),
        max_size=12,
    )
)
def test_counts_always_sum_to_the_rows(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("p")
    source = write(folder / "d.jsonl", [*rows, chat("the last", "row")])
    store, report = make(folder / "s", source)
    assert report.rows == 1 + sum(bool(row.strip()) for row in rows)
    distinct = {
        row.strip() for row in rows if row.strip() in map(str.encode, map(json.dumps, GOOD))
    }
    assert report.trained == len(store) == 1 + len(distinct)


class Stubborn:
    """An encoder that a certain row makes fail in a way nobody thought of."""

    def __init__(self, tokenizer, options):
        self.inner = REAL(tokenizer, options)

    def encode(self, rows):
        if any("poison" in str(row) for row in rows):
            raise ZeroDivisionError("in a library")
        return self.inner.encode(rows)


REAL = encode.RowEncoder


def test_a_row_nobody_thought_of_is_skipped_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "RowEncoder", Stubborn)
    rows = [*GOOD[:4], chat("poison", "x"), *GOOD[4:]]
    _, report = make(tmp_path / "s", write(tmp_path / "d.jsonl", rows))
    assert (report.trained, report.skipped) == (9, {"row cannot be encoded": 1})
    assert "ZeroDivisionError: in a library" in str(report)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path = tmp_path_factory.mktemp("target")
    TOKENIZER.save_pretrained(path)
    return str(path)


def cli(*arguments, **options):
    line = [sys.executable, "-m", "dflash_ext.prepare", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def test_command_line(tmp_path, target, capsys):
    source = write(tmp_path / "d.jsonl", [*GOOD, b"{"])
    store = tmp_path / "s"
    arguments = [source, "--target", target, "--out", str(store), "--max-length", "128"]
    assert command.main([*arguments, "--held-out", "2"]) == 0
    printed = capsys.readouterr().out
    assert "10 rows: 9 trained (9 samples" in printed
    assert "rows/s" in printed
    report = json.loads((store / "report.json").read_text())
    assert (report["rows"], report["trained"], report["skipped"]) == (10, 9, {"not JSON": 1})
    assert (report["train"]["samples"], report["held_out"]["samples"]) == (7, 2)
    opened = TokenStore.open(store)
    total = report["train"]["tokens_per_epoch"] + report["held_out"]["tokens"]
    assert total == int(opened.lengths.sum()) == report["tokens"]
    share = sum(int(opened.sample(i)[1].sum()) for i in range(len(opened))) / total
    assert report["supervised_share"] == pytest.approx(share)
    assert (store / "lengths.png").read_bytes().startswith(b"\x89PNG")
    assert command.main(["--out", str(store), "--verify"]) == 0
    assert "every checksum is right" in capsys.readouterr().out
    tokens = store / "tokens.i32"
    tokens.write_bytes(b"\xff" + tokens.read_bytes()[1:])
    with pytest.raises(UserError, match=r"tokens\.i32 fails its checksum"):
        command.main(["--out", str(store), "--verify"])
    with pytest.raises(UserError, match="no source was named"):
        command.main(["--out", str(store)])
    with pytest.raises(UserError, match="workers -1"):
        command.main([*arguments, "--workers", "-1"])
    with pytest.raises(UserError, match=r"tokenizer of '.*nowhere' cannot be loaded"):
        command.main([source, "--target", str(tmp_path / "nowhere"), "--out", str(store)])


def test_mistakes_are_one_line_and_status_two(tmp_path, target):
    process = cli(str(tmp_path / "x.jsonl"), "--target", target, "--out", str(tmp_path / "s"))
    out, error = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert error.startswith("error: cannot read ")
    assert error.count("\n") == 1


def children(pid):
    """Living processes whose command line belongs to this run's pool."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "status").read_text()
                session = (entry / "stat").read_text().rpartition(")")[2].split()[3]
            except (OSError, IndexError):
                continue
            if int(session) == pid and "State:\tZ" not in status:
                found.append(int(entry.name))
    return found


COMMITS_OFTEN = """
import sys
from dflash_ext.data.prepared import prepare
from dflash_ext.data.rows import ChatOptions
from dflash_ext.prepare import load_tokenizer
if __name__ == "__main__":
    source, target, store = sys.argv[1:]
    tokenizer = load_tokenizer(target, trust_remote_code=False)
    prepare([source], tokenizer, store, ChatOptions(), workers=2, commit_seconds=0.0)
"""


def test_killed_and_run_again(tmp_path, target):
    """kill -9 loses at most what was not committed, leaves no process behind, and goes on."""
    rows = [chat(f"q {i}", f"answer {i} " + "word " * 40) for i in range(12_000)]
    source = write(tmp_path / "d.jsonl", rows)
    store = tmp_path / "s"
    script = tmp_path / "run.py"
    script.write_text(COMMITS_OFTEN)
    process = subprocess.Popen(
        [sys.executable, str(script), source, target, str(store)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        start_new_session=True,
    )

    def committed():
        try:
            return json.loads((store / "index.json").read_text())["committed"]["rows"]
        except FileNotFoundError:
            return 0

    deadline = time.monotonic() + 120
    while committed() < 500:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = committed()
    assert 500 <= done < 12_000
    while left := children(process.pid):
        assert time.monotonic() < deadline, f"{left} outlived their parent"
        time.sleep(0.05)
    encoded = 0

    def count(state):
        nonlocal encoded
        encoded = state.rows

    tokenizer = command.load_tokenizer(target, trust_remote_code=False)
    report = prepare([source], tokenizer, store, ChatOptions(), workers=1, progress=count)
    assert (report.rows, report.trained) == (12_000, 12_000)
    assert encoded == 12_000 - done
    answers = TokenStore.open(store)
    for i in (0, done - 1, done, 11_999):
        ids, mask = answers.sample(i)
        assert tokenizer.decode(ids[mask]).startswith(f"answer {i} word")


def test_a_dead_worker_is_one_line(tmp_path, target):
    rows = [chat(f"q {i}", f"answer {i} " + "word " * 200) for i in range(4000)]
    source = write(tmp_path / "d.jsonl", rows)
    process = cli(
        source,
        "--target",
        target,
        "--out",
        str(tmp_path / "s"),
        "--workers",
        "2",
        start_new_session=True,
    )
    deadline, victims = time.monotonic() + 120, []
    try:
        while not victims:  # the forkserver's own children: the workers
            servers = {p for p in children(process.pid) if "forkserver" in cmdline(p)}
            victims = [p for p in servers if parent(p) in servers]
            assert time.monotonic() < deadline
            assert process.poll() is None
        os.kill(victims[0], signal.SIGKILL)
        _, error = process.communicate(timeout=60)
    finally:
        for pid in children(process.pid):
            os.kill(pid, signal.SIGKILL)
    assert process.returncode == 2
    assert error.startswith("error: a worker process died (exit code -9")
    assert error.count("\n") == 1


def cmdline(pid):
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_text()
    except OSError:
        return ""


def parent(pid):
    try:
        return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def test_an_unfinished_store_of_another_writer_is_not_taken_over(tmp_path):
    writer = StoreWriter(tmp_path / "s")
    writer.append([1, 2], [True, True])
    writer.commit()
    writer.release()
    with pytest.raises(UserError, match="was prepared otherwise"):
        make(tmp_path / "s", write(tmp_path / "d.jsonl", GOOD))
