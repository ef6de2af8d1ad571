"""Rows in every format people write, whole or broken, long or short."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest
from data_fixtures import CHATML, FAMILIES, THINKING, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ext.data import encode as module
from dflash_ext.data.encode import RowEncoder, encode_row, fit
from dflash_ext.data.formats import Conversation, Text, Tokens, parse_json, parse_prompt, parse_row
from dflash_ext.data.rows import FIELDS, ChatOptions, Row, SkipRow


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


GOOD = [user("hi there"), assistant("Hello!")]


def supervised(row, template=CHATML, **options):
    tokenizer = make_tokenizer(template)
    rows = encode_row(tokenizer, row, ChatOptions(**options))
    return [tokenizer.decode(r.ids[r.mask]) for r in rows]


SAME = {
    "messages": {"messages": GOOD},
    "a bare list": GOOD,
    "other columns": {"messages": GOOD, "id": 7, "source": None, "text": "ignored"},
    "columns that Arrow filled in": {
        "messages": [
            {"role": m["role"], "content": m["content"], "name": None, "tool_calls": None}
            for m in GOOD
        ],
        "conversations": None,
        "tools": None,
    },
    "ShareGPT": {
        "conversations": [
            {"from": "human", "value": "hi there"},
            {"from": "gpt", "value": "Hello!"},
        ]
    },
    "roles in conversations": {"conversations": GOOD},
    "prompt and completion": {"prompt": "hi there", "completion": "Hello!"},
    "prompt and completion as messages": {"prompt": GOOD[:1], "completion": GOOD[1:]},
    "mixed": {"prompt": GOOD[:1], "completion": "Hello!"},
    "parts": {
        "messages": [
            user([{"type": "text", "text": "hi "}, {"type": "text", "text": "there"}]),
            assistant([{"type": "text", "text": "Hello!"}]),
        ]
    },
    "what follows the last answer": [*GOOD, user("ignored")],
}


@pytest.mark.parametrize("name", SAME)
def test_formats_say_the_same(name):
    tokenizer = make_tokenizer(CHATML)
    (row,) = encode_row(tokenizer, SAME[name], ChatOptions())
    (truth,) = encode_row(tokenizer, {"messages": GOOD}, ChatOptions())
    assert row.ids.tolist() == truth.ids.tolist()
    assert row.mask.tolist() == truth.mask.tolist()


def test_arrays_have_the_promised_types():
    (row,) = encode_row(make_tokenizer(CHATML), {"messages": GOOD}, ChatOptions())
    assert (row.ids.dtype, row.mask.dtype) == (np.int32, np.bool_)
    (row,) = encode_row(make_tokenizer(CHATML), {"ids": [3, 4], "mask": [1, 1]}, ChatOptions())
    assert (row.ids.dtype, row.mask.dtype) == (np.int32, np.bool_)


def test_system_texts_of_their_own_column():
    for row in (
        {"system": "Be kind.", "conversations": GOOD},
        {"system": "Be kind.", "prompt": "hi there", "completion": "Hello!"},
        {"messages": [{"role": "developer", "content": "Be kind."}, *GOOD]},
    ):
        tokenizer = make_tokenizer(CHATML)
        (found,) = encode_row(tokenizer, row, ChatOptions())
        assert tokenizer.decode(found.ids).startswith("<|im_start|>system\nBe kind.<|im_end|>")
        assert tokenizer.decode(found.ids[found.mask]) == "Hello!<|im_end|>"


def test_only_the_completion_is_supervised():
    turns = [user("a"), assistant("given"), user("b")]
    row = {"prompt": turns, "completion": [assistant("own")]}
    assert supervised(row) == ["own<|im_end|>"]
    assert supervised({"messages": [*turns, assistant("own")]}) == ["given<|im_end|>own<|im_end|>"]
    with pytest.raises(SkipRow, match="no assistant turn: in the completion"):
        supervised({"prompt": [user("a"), assistant("b")], "completion": [user("c")]})


def test_share_gpt_function_calls():
    turns = [
        {"from": "human", "value": "a"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "5"},
        {"from": "gpt", "value": "It is 5."},
    ]
    parsed = parse_row({"conversations": turns, "tools": '[{"name": "f"}]'})
    assert [m["role"] for m in parsed.messages] == ["user", "assistant", "tool", "assistant"]
    (call,) = parsed.messages[1]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": {"x": 1}}
    assert parsed.tools == [{"name": "f"}]


def test_thinking_parts_and_names_of_the_reasoning():
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "b"}]
    for answer in (
        assistant(parts),
        assistant("b", reasoning_content="hm"),
        assistant("b", reasoning="hm"),
        assistant("b", thinking="hm"),
        assistant("<think>\nhm\n</think>\n\nb"),
    ):
        texts = supervised([user("a"), answer], THINKING)
        assert texts == ["<think>\nhm\n</think>\n\nb<|im_end|>"]


def test_plain_text_is_supervised_in_windows():
    tokenizer = make_tokenizer(CHATML)
    text = "The quick brown fox jumps over the lazy dog. " * 20
    whole = tokenizer(text, add_special_tokens=False).input_ids
    rows = encode_row(tokenizer, {"text": text}, ChatOptions(max_length=50))
    assert [i for row in rows for i in row.ids.tolist()] == whole[: sum(len(r.ids) for r in rows)]
    assert len(whole) - sum(len(r.ids) for r in rows) <= 1  # a last single token has no label
    assert all(row.mask.all() and len(row.ids) <= 50 for row in rows)


def test_every_window_begins_as_the_tokenizer_begins_a_text():
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer(CHATML)
    start = tokenizer.convert_tokens_to_ids("<s>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", start)]
    )
    rows = encode_row(tokenizer, {"text": "Hello there! " * 40}, ChatOptions(max_length=20))
    assert len(rows) > 3
    for row in rows:
        assert row.ids[0] == start
        assert row.mask.tolist() == [False] + [True] * (len(row.ids) - 1)
        assert len(row.ids) <= 20


@pytest.mark.parametrize("names", [("ids", "mask"), ("input_ids", "loss_mask")])
def test_given_tokens(names):
    tokenizer = make_tokenizer(None)  # no template is needed
    encoder = RowEncoder(tokenizer, ChatOptions(max_length=6))

    def one(ids, mask):
        return encoder.encode([{names[0]: ids, names[1]: mask}])[0]

    (row,) = one([5, 6, 7, 8], [0, 0, 1, True])
    assert (row.ids.tolist(), row.mask.tolist()) == ([5, 6, 7, 8], [False, False, True, True])
    assert (row.cut, row.cut_tokens) == ("", 0)
    (row,) = one(range(10, 20), [1] * 10)
    assert (row.ids.tolist(), row.cut, row.cut_tokens) == (list(range(10, 16)), "answer", 4)
    (row,) = one(range(10, 20), [1] * 6 + [0] * 4)
    assert (row.cut, row.cut_tokens) == ("", 4)
    (row,) = one(range(10, 20), [0, 1, 1, 0, 1, 1, 1, 0, 1, 1])  # three turns, of which one fits
    assert (row.ids.tolist(), row.cut, row.cut_turns) == ([10, 11, 12], "turns", 2)
    for ids, mask, reason in (
        ([1, 2, 3], [0, 1], "ids and mask differ in length: 3 token ids but 2 mask values"),
        ([], [], "no tokens"),
        ([1, -2], [1, 1], "ids is not a list of token ids"),
        ([1, 2.5], [1, 1], "ids is not a list of token ids"),
        ([1, None], [1, 1], "ids is not a list of token ids"),
        ([1, 2**40], [1, 1], "ids is not a list of token ids"),
        ([1, 10**30], [1, 1], "ids is not a list of token ids"),
        ([[1], [2, 3]], [1, 1], "ids is not a list of token ids"),
        ([True, False], [1, 1], "ids is not a list of token ids"),
        ("12", [1, 1], "ids is not a list of token ids"),
        ([1, 2], [1, 2], "mask is not a list of 0 and 1"),
        ([1, 2], ["1", "1"], "mask is not a list of 0 and 1"),
        ([1, 2], [0.0, 1.0], "mask is not a list of 0 and 1"),
        ([1, 9999], [1, 1], "token id outside the vocabulary: 9999"),
        ([1, 2, 3], [1, 0, 1], "too few supervised tokens"),
        ([1] * 9, [0] * 6 + [1] * 3, "too few supervised tokens"),
    ):
        found = one(ids, mask)
        assert isinstance(found, SkipRow), ids
        assert str(found).startswith(reason)


BAD = {
    "row is not an object": 7,
    "row has no known columns": {"txt": "a"},
    "text is not a string": {"text": 5},
    "text is empty": {"text": " \n"},
    "messages is not a list": {"messages": {"role": "user"}},
    "conversations is empty": {"conversations": []},
    "prompt is not a list": {"prompt": 3, "completion": "a"},
    "completion is empty": {"prompt": "a", "completion": []},
    "content has no parts": [user("a"), assistant([])],
    "reasoning is not a string": [user("a"), assistant("b", reasoning_content=3)],
    "tool_calls is not a list of an assistant's calls": [user("a"), assistant("b", tool_calls="x")],
    "tool call has no function name": [user("a"), assistant("b", tool_calls=[{"name": 3}])],
    "tool call's arguments are no JSON object": [
        user("a"),
        assistant("b", tool_calls=[{"name": "f", "arguments": "[1]"}]),
    ],
    "a tool answers nobody": [user("a"), {"role": "tool", "content": "5"}, assistant("b")],
    "tools is not a list of objects": {"messages": GOOD, "tools": "{"},
    "unknown role": [{"from": "narrator", "value": "a"}],
}


@pytest.mark.parametrize("reason", BAD)
def test_bad_rows_say_why(reason):
    with pytest.raises(SkipRow) as caught:
        encode_row(make_tokenizer(CHATML), BAD[reason], ChatOptions())
    assert caught.value.reason == reason


def test_huge_and_deep_rows_are_reasons(monkeypatch):
    from dflash_ext.data import formats

    monkeypatch.setattr(formats, "MAX_CHARACTERS", 1000)
    for row in ({"text": "a" * 1001}, [user("a" * 600), assistant("b" * 600)]):
        with pytest.raises(SkipRow, match="row is too long"):
            parse_row(row)
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for row in ({"messages": deep}, {"messages": GOOD, "tools": [{"a": deep}]}, deep):
        with pytest.raises(SkipRow):
            parse_row(row)
    with pytest.raises(SkipRow, match="not JSON"):
        parse_json(b"[" * 100_000)


def test_details_are_short():
    with pytest.raises(SkipRow) as caught:
        parse_row([{"role": "x" * 10_000, "content": "a"}])
    assert len(caught.value.detail) <= 200


# Truncation ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "bounds", "max_length", "expected"),
    [
        (10, [(2, 9)], 10, (10, "", 0)),
        (10, [(2, 9)], 9, (9, "", 0)),  # the template's last line end is lost, no answer is
        (10, [(2, 9)], 8, (8, "answer", 0)),
        (30, [(2, 9), (12, 20), (22, 29)], 25, (20, "turns", 1)),
        (30, [(2, 9), (12, 20), (22, 29)], 20, (20, "turns", 1)),
        (30, [(2, 9), (12, 20), (22, 29)], 19, (9, "turns", 2)),
        (30, [(2, 9), (12, 20), (22, 29)], 5, (5, "answer", 2)),
    ],
)
def test_whole_turns_are_kept(length, bounds, max_length, expected):
    assert fit(length, bounds, max_length) == expected


def test_truncated_rows_say_what_was_cut():
    tokenizer = make_tokenizer(CHATML)
    turns = [user("a"), assistant("first"), user("b"), assistant("second")]
    (whole,) = encode_row(tokenizer, turns, ChatOptions())
    ends = np.flatnonzero(whole.mask[:-1] & ~whole.mask[1:]) + 1  # behind each answer
    for length in range(2, len(whole.ids) + 1):
        (result,) = RowEncoder(tokenizer, ChatOptions(max_length=length)).encode([turns])
        if isinstance(result, SkipRow):
            assert result.reason == "too few supervised tokens"
            assert whole.mask[:length].sum() < 2
            continue
        (row,) = result
        kept = len(row.ids)
        assert kept <= length
        assert row.ids.tolist() == whole.ids[:kept].tolist()
        assert row.mask.tolist() == whole.mask[:kept].tolist()
        assert row.cut_tokens == len(whole.ids) - kept
        if length >= ends[1]:
            assert (row.cut, row.cut_turns) == ("", 0)
        elif length >= ends[0]:
            assert (row.cut, row.cut_turns, kept) == ("turns", 1, ends[0])
        else:
            assert (row.cut, row.cut_turns, kept) == ("answer", 1, length)


def test_a_turn_whose_sample_came_to_nothing_is_counted():
    """Where each turn is a sample, a long conversation loses its later ones."""
    tokenizer = make_tokenizer(THINKING)
    turns = [user("a"), assistant("first"), user("b " * 40), assistant("second")]
    whole = encode_row(tokenizer, turns, ChatOptions())
    rows = encode_row(tokenizer, turns, ChatOptions(max_length=len(whole[0].ids) + 5))
    (row,) = rows
    assert row.ids.tolist() == whole[0].ids.tolist()
    assert (row.cut, row.cut_turns) == ("turns", 1)


# Properties ------------------------------------------------------------------------------------

NAMES = (*FIELDS, "role", "content", "from", "value", "type", "function", "name", "arguments", "id")
NAMES += ("reasoning_content", "tool_calls", "unfinished", "thinking")
ROLES = ["system", "user", "assistant", "tool", "human", "gpt", "function_call"]
TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["<think>", "</think>", "<|im_end|>", "\n\n", "{", "Zq7Sentinel7qZ", *ROLES]),
)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
    ),
    max_leaves=12,
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(ROLES), "content": st.one_of(TEXTS, VALUES)},
    optional={"reasoning_content": TEXTS, "tool_calls": VALUES, "unfinished": st.booleans()},
)
ROWS = st.one_of(
    VALUES,
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4),
    st.fixed_dictionaries({"messages": st.lists(MESSAGES, max_size=5)}),
    st.fixed_dictionaries({"conversations": st.lists(MESSAGES, max_size=4), "tools": VALUES}),
    st.fixed_dictionaries({"ids": st.lists(st.integers(), max_size=5), "mask": VALUES}),
    st.fixed_dictionaries({"prompt": VALUES, "completion": VALUES}),
)
ENCODERS = {
    name: RowEncoder(make_tokenizer(template), ChatOptions(max_length=64, reasoning=reasoning))
    for name, (template, _), reasoning in (
        ("chatml", FAMILIES["chatml"], "keep"),
        ("mistral", FAMILIES["mistral"], "mask"),
        ("thinking", FAMILIES["thinking"], "mask"),
        ("open_thinking", FAMILIES["open_thinking"], "keep"),
    )
}


@given(rows=st.lists(ROWS, min_size=1, max_size=4))
@settings(max_examples=100)
def test_any_row_is_samples_or_a_reason(rows):
    for encoder in ENCODERS.values():
        results = encoder.encode(rows)
        assert len(results) == len(rows)
        for result in results:
            if isinstance(result, SkipRow):
                assert result.reason
                continue
            assert result
            for row in result:
                assert isinstance(row, Row)
                assert 2 <= len(row.ids) == len(row.mask) <= 64
                assert (row.mask[:-1] & row.mask[1:]).any()
    for row in rows:
        for parse, kinds in (
            (parse_row, (Conversation, Text, Tokens)),
            (parse_prompt, Conversation),
        ):
            with contextlib.suppress(SkipRow):
                assert isinstance(parse(row), kinds)


@given(
    answers=st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=3),
    questions=st.text(max_size=10),
)
@settings(max_examples=80)
def test_what_is_supervised_is_the_answers_and_their_ends(answers, questions):
    """Requirement 3, over any text: whatever is trained decodes to exactly the answers."""
    messages = []
    for answer in answers:
        messages += [user(questions), assistant(answer)]
    for name, encoder in ENCODERS.items():
        (result,) = encoder.encode([messages])
        if isinstance(result, SkipRow):
            continue
        end = FAMILIES[name][1]
        decode = encoder._tokenizer.decode
        texts = [decode(row.ids[row.mask]) for row in result if row.cut != "answer"]
        if name in ("thinking", "open_thinking"):
            expected = [answer + end for answer in answers][: len(texts)]
        elif result[0].cut:
            continue
        else:
            trim = str.strip if name == "mistral" else str
            lead = " " if name == "mistral" else ""
            expected = ["".join(f"{lead}{trim(answer)}{end}" for answer in answers)]
        assert texts == expected


@given(st.text(max_size=60))
@settings(max_examples=100)
def test_byte_lengths_add_up_to_the_text(text):
    """What the fast way to find tokens rests on."""
    encoder = ENCODERS["chatml"]
    ids = encoder._backend.encode(text, add_special_tokens=False).ids
    assert int(encoder._lengths[ids].sum()) == len(text.encode())


def test_tokenizers_whose_tokens_have_no_fixed_bytes_are_read_by_offsets():
    from data_fixtures import make_word_tokenizer

    tokenizer = make_word_tokenizer()
    assert module.byte_lengths(tokenizer) is None
    (row,) = encode_row(tokenizer, [user("w1 w2"), assistant("w3 w4")], ChatOptions())
    assert tokenizer.decode(row.ids[row.mask]) == "w3 w4 <|im_end|>"
    with pytest.raises(SkipRow, match="does not survive the tokenizer"):
        encode_row(tokenizer, [user("w1"), assistant("w3 unheard-of")], ChatOptions())


def test_composed_letters_are_read_by_offsets():
    """A tokenizer that composes (NFC, as Qwen's) reads other bytes than the text has."""
    from tokenizers import normalizers

    tokenizer = make_tokenizer(CHATML)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    assert module.byte_lengths(tokenizer) is not None
    for answer in ("plain", "caf\u00e9", "cafe\u0301 and more"):
        (row,) = encode_row(tokenizer, [user("cafe\u0301"), assistant(answer)], ChatOptions())
        text = tokenizer.decode(row.ids[row.mask])
        assert text == answer.replace("e\u0301", "\u00e9") + "<|im_end|>"


def test_rows_survive_json():
    for row in SAME.values():
        assert json.loads(json.dumps(row)) == row
