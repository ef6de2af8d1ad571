"""Preparing: every row has one outcome, and a reason where it is not trained."""

from __future__ import annotations

import json

import pytest
from data_fixtures import MISTRAL, THINKING, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from prepare_cases import GOOD, TOKENIZER, chat, make, texts, write

from dflash_ext.data import blocks, encode
from dflash_ext.data.prepared import DUPLICATE_REASON
from dflash_ext.errors import UserError

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


def test_empty_files_and_nothing_to_train(tmp_path):
    for name in ("d.jsonl", "d.json"):
        (tmp_path / name).write_text("")
        with pytest.raises(UserError, match=rf"0 trainable rows of 0 in .*{name}; expected rows"):
            make(tmp_path / "s", str(tmp_path / name))
    _, report = make(tmp_path / "s", str(tmp_path / "d.json"), write(tmp_path / "e.jsonl", GOOD))
    assert report.rows == 9


def test_unread_rows_of_files_of_one_name_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "MAX_ROW_BYTES", 500)
    for folder, length in (("a", 600), ("b", 700)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "d.jsonl", [chat("q", "x" * length), chat("q", folder)])
    for folders, counts in ((("a",), (2, 1)), (("b", "a"), (4, 2)), (("a", "b"), (4, 2))):
        sources = [str(tmp_path / folder) for folder in folders]
        _, report = make(tmp_path / "s", *sources)
        assert (report.rows, report.skipped) == (counts[0], {"row is too large": counts[1]})


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


def test_system_message_with_a_template_that_refuses_it(tmp_path):
    row = {"messages": [{"role": "system", "content": "s"}, *GOOD[1]["messages"]]}
    source = write(tmp_path / "d.jsonl", [row, GOOD[0]])
    _, report = make(tmp_path / "s", source, tokenizer=make_tokenizer(MISTRAL))
    assert report.skipped == {"template refused the conversation": 1}
    assert "only user and assistant roles" in str(report)


@settings(max_examples=40)
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


def test_workers_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 3)
    rows = [x for i, row in enumerate(GOOD) for x in (row, list(BAD)[i])]
    source = write(tmp_path / "d.jsonl", rows)
    one, alone = make(tmp_path / "one", source)
    two, shared = make(tmp_path / "two", source, workers=2)
    assert (one.identity, alone) == (two.identity, shared)
