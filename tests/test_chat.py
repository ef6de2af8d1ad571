from __future__ import annotations

import json

import pytest
from data_fixtures import CHATML, FAMILIES, LLAMA3, MISTRAL, THINKING, make_tokenizer

from dflash_ext.data.encode import encode_row
from dflash_ext.data.jsonl import PrepareReport, prepare_jsonl, prepared_store
from dflash_ext.data.rows import ChatOptions, SkipRow
from dflash_ext.data.store import TokenStore
from dflash_ext.errors import UserError


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


GOOD = [user("hi there"), assistant("Hello!")]
REWRITING = ("thinking", "open_thinking")
ANSWERS = ["Hello there!", "Naïve: 漢字 🙂\n\n- a\n- b", "x", "  spaced  out", "2 < 3 </p>"]


@pytest.fixture(params=FAMILIES)
def family(request):
    template, end = FAMILIES[request.param]
    return request.param, make_tokenizer(template), end


def encode(tokenizer, messages, **options):
    return encode_row(tokenizer, {"messages": messages}, ChatOptions(**options))


def supervised(tokenizer, row):
    return tokenizer.decode(row.ids[row.mask])


def trimmed(name, text):
    return text.strip() if name in ("llama3", "gemma", "mistral") else text


@pytest.mark.parametrize("answer", ANSWERS)
def test_supervised_is_the_answer_and_its_end(family, answer):
    name, tokenizer, end = family
    messages = [user("What is it?"), assistant(answer)]
    (row,) = encode(tokenizer, messages, max_length=512)
    # Mistral's template puts a space behind the prompt, which the model therefore has to write.
    lead = " " if name == "mistral" else ""
    assert supervised(tokenizer, row) == lead + trimmed(name, answer) + end
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert row.ids.tolist() == tokenizer(whole, add_special_tokens=False).input_ids
    first = row.mask.argmax()
    assert all(row.mask[first : first + row.mask.sum()])  # one run, nothing behind it


def test_what_comes_before_the_answer_is_the_prompt(family):
    name, tokenizer, _ = family
    messages = [user("What is it?"), assistant("Hello there!")]
    (row,) = encode(tokenizer, messages, max_length=512)
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    if name in REWRITING:  # an answer without thinking follows an empty, unsupervised block
        prompt = prompt.removesuffix("<think>\n") + "<think>\n\n</think>\n\n"
    assert tokenizer.decode(row.ids[: row.mask.argmax()]) == prompt


def test_several_turns(family):
    name, tokenizer, end = family
    messages = [user("a"), assistant("first"), user("b"), assistant("second"), user("unanswered")]
    rows = encode(tokenizer, messages, max_length=512)
    lead = " " if name == "mistral" else ""
    if name in REWRITING:
        # An earlier answer is rendered without its think block: each turn is its own sample.
        assert [supervised(tokenizer, row) for row in rows] == ["first" + end, "second" + end]
        assert "unanswered" not in tokenizer.decode(rows[1].ids)
        assert "second" not in tokenizer.decode(rows[0].ids)
    else:
        (row,) = rows
        assert supervised(tokenizer, row) == f"{lead}first{end}{lead}second{end}"
        assert "unanswered" not in tokenizer.decode(row.ids)


@pytest.mark.parametrize("name", REWRITING)
@pytest.mark.parametrize("inline", [True, False])
def test_thinking_is_supervised_but_empty_blocks_are_not(name, inline):
    tokenizer = make_tokenizer(FAMILIES[name][0])
    if inline:
        thought = assistant("<think>\nhm, yes\n</think>\n\nsecond")
    else:
        thought = assistant("second", reasoning_content="hm, yes")
    messages = [user("a"), assistant("first"), user("b"), thought]
    rows = encode(tokenizer, messages, max_length=512)
    opening = "" if name == "open_thinking" else "<think>\n"  # there the prompt contains it
    assert [supervised(tokenizer, row) for row in rows] == [
        "first<|im_end|>",
        f"{opening}hm, yes\n</think>\n\nsecond<|im_end|>",
    ]


def test_default_system_prompt_is_context(family):
    template = (
        "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n"
        "{% endif %}" + CHATML
    )
    tokenizer = make_tokenizer(template)
    (row,) = encode(tokenizer, GOOD, max_length=512)
    assert supervised(tokenizer, row) == "Hello!<|im_end|>"
    assert "Be kind." in tokenizer.decode(row.ids[: row.mask.argmax()])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        # the end of the prompt is not where the answer begins
        (
            CHATML.replace("assistant\n{% endif %}", "bot\n{% endif %}"),
            "does not extend its prompt",
        ),
        (CHATML.replace("{{ m['content'] }}", "{{ m['content'] | upper }}"), "changes the"),
        (CHATML.replace("{{ m['content'] }}", "{{ m['content'][:3] }}"), "changes the"),
        (CHATML.replace("{{ m['content'] }}", "same"), "changes the"),
        (CHATML.replace("<|im_end|>", ""), "no end-of-turn token"),
        # the prompt stops short of the line end, so the model has to write it
        (CHATML.replace("assistant\n{% endif %}", "assistant{% endif %}"), None),
        ("{{ messages[9]['content'] }}", "template refused"),
    ],
)
def test_templates_that_cannot_be_masked_are_refused(template, reason):
    tokenizer = make_tokenizer(template)
    messages = [user("hi there"), assistant("Hello Hello!")]
    if reason is None:
        (row,) = encode(tokenizer, messages, max_length=512)
        assert supervised(tokenizer, row) == "\nHello Hello!<|im_end|>"
        return
    with pytest.raises(SkipRow, match=reason):
        encode(tokenizer, messages, max_length=512)


def test_a_token_across_the_border_is_refused():
    # The prompt's line end and the answer's first one would be a single token.
    tokenizer = make_tokenizer(CHATML)
    messages = [user("a"), assistant("\n\nb")]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert "ĊĊ" in tokenizer.tokenize(text.partition("assistant")[2], add_special_tokens=False)
    with pytest.raises(SkipRow, match="crosses the border"):
        encode(tokenizer, messages, max_length=512)


MALFORMED = {
    "messages is empty": [],
    "assistant speaks first": [assistant("hi")],
    "only a system message": [{"role": "system", "content": "s"}],
    "roles do not alternate": [user("a"), user("b")],
    "unknown role": [{"role": "robot", "content": "a"}, assistant("b")],
    "content is null": [user("a"), assistant(None)],
    "content has a part that is not text": [
        user([{"type": "image", "image": "x"}]),
        assistant("b"),
    ],
}
SURROGATE = "half a smile \ud83d"  # json.dumps writes it as legal, pure ASCII JSON
MORE_MALFORMED = {
    "text is not UTF-8": [user(SURROGATE), assistant("b")],
    "assistant's content is empty": [user("hi"), assistant("")],
    "messages is not a list": "hello",
    "message is not an object": ["hello"],
    "content is not a string": [user(3), assistant("b")],
    "no assistant turn": [user("a")],
    "system message is not the first": [user("a"), {"role": "system", "content": "s"}],
    "tool call has no function name": [user("a"), assistant(None, tool_calls=[{"id": 1}])],
}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("cases", [MALFORMED, MORE_MALFORMED])
def test_each_malformed_row_has_its_own_reason(tmp_path, cases):
    data = write_jsonl(tmp_path / "d.jsonl", [*cases.values(), GOOD])
    report = prepare_jsonl(data, make_tokenizer(CHATML), tmp_path / "s", max_length=64)
    assert report.skipped == dict.fromkeys(cases, 1)
    assert (report.rows, report.trained) == (len(cases) + 1, 1)
    for reason in cases:
        assert reason in str(report)
    saved = PrepareReport(**TokenStore.open(tmp_path / "s").info)
    assert saved == report


@pytest.mark.parametrize(
    "messages",
    [
        [user("a"), assistant(SURROGATE)],
        [{"role": "system", "content": SURROGATE}, *GOOD],
        [user("a"), assistant("b", reasoning_content=SURROGATE)],
    ],
)
def test_a_lone_surrogate_anywhere_is_a_reason(messages):
    with pytest.raises(SkipRow, match="text is not UTF-8"):
        encode(make_tokenizer(CHATML), messages, max_length=64)


def test_lines_that_are_no_conversations(tmp_path):
    data = tmp_path / "d.jsonl"
    good = json.dumps({"messages": GOOD}).encode()
    lines = [b"{", b"\xff\xfe", b"[]", b'{"txt": "a"}', b"", b"[" * 100_000, good]
    data.write_bytes(b"\n".join(lines))
    report = prepare_jsonl(data, make_tokenizer(CHATML), tmp_path / "s", max_length=64)
    assert report.skipped == {
        "not JSON": 2,
        "not UTF-8": 1,
        "messages is empty": 1,
        "row has no known columns": 1,
    }
    assert report.rows == report.trained + sum(report.skipped.values()) == 6
    assert report.examples["not UTF-8"] == "line 2"


def test_one_empty_answer_among_good_rows_and_alone(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    empty = [user("hi"), assistant("")]
    data = write_jsonl(tmp_path / "d.jsonl", [GOOD] * 4 + [empty] + [GOOD] * 5)
    report = prepare_jsonl(data, tokenizer, tmp_path / "s", max_length=64)
    assert (report.rows, report.trained, sum(report.skipped.values())) == (10, 9, 1)
    alone = write_jsonl(tmp_path / "e.jsonl", [empty])
    with pytest.raises(UserError, match="0 trainable rows of 1 "):
        prepare_jsonl(alone, tokenizer, tmp_path / "t", max_length=64)
    assert not (tmp_path / "t").exists()


def test_store_holds_every_sample_of_fanned_out_rows(tmp_path):
    tokenizer = make_tokenizer(THINKING)
    two = [user("a"), assistant("first"), user("b"), assistant("second")]
    data = write_jsonl(tmp_path / "d.jsonl", [two, GOOD])
    report = prepare_jsonl(data, tokenizer, tmp_path / "s", max_length=128)
    assert (report.rows, report.trained, report.samples) == (2, 2, 3)
    store = TokenStore.open(tmp_path / "s")
    texts = []
    for i in range(len(store)):
        ids, mask = store.sample(i)
        texts.append(tokenizer.decode(ids[mask]))
    assert texts == [f"{t}<|im_end|>" for t in ("first", "second", "Hello!")]


def test_truncation_keeps_a_prefix_or_skips():
    tokenizer = make_tokenizer(CHATML)
    (whole,) = encode(tokenizer, GOOD, max_length=512)
    first = whole.mask.argmax()
    (cut,) = encode(tokenizer, GOOD, max_length=first + 2)
    assert cut.ids.tolist() == whole.ids[: first + 2].tolist()
    assert cut.mask.tolist() == whole.mask[: first + 2].tolist()
    for length in (first, first + 1):  # nothing, and one token: no anchor has a label
        with pytest.raises(SkipRow, match="too few supervised tokens"):
            encode(tokenizer, GOOD, max_length=length)


def test_tokenizers_without_template_or_offsets(tmp_path):
    tokenizer = make_tokenizer(None)
    tokenizer.save_pretrained(tmp_path / "tok")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tok")
    data = write_jsonl(tmp_path / "d.jsonl", [GOOD])
    with pytest.raises(UserError, match=f"{tmp_path / 'tok'} has no chat template"):
        prepare_jsonl(data, tokenizer, tmp_path / "s", max_length=64)

    class Slow:
        chat_template, is_fast, name_or_path = CHATML, False, "some/slow"

    with pytest.raises(UserError, match="some/slow reports no character offsets"):
        encode(Slow(), GOOD, max_length=64)


def test_data_file_and_options_are_checked(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    with pytest.raises(UserError, match="cannot read"):
        prepare_jsonl(tmp_path / "none.jsonl", tokenizer, tmp_path / "s", max_length=64)
    with pytest.raises(UserError, match=r"cannot read .*none\.jsonl: No such file"):
        prepared_store(tmp_path / "none.jsonl", tokenizer, max_length=64, root=tmp_path)
    with pytest.raises(UserError, match=r"cannot read .*: Is a directory"):
        prepared_store(tmp_path, tokenizer, max_length=64, root=tmp_path)
    with pytest.raises(UserError, match="cannot read /proc/self/mem: "):  # opens, does not read
        prepared_store("/proc/self/mem", tokenizer, max_length=64, root=tmp_path)
    (tmp_path / "d.jsonl").write_text("\n")
    with pytest.raises(UserError, match="0 trainable rows of 0"):
        prepare_jsonl(tmp_path / "d.jsonl", tokenizer, tmp_path / "s", max_length=64)
    with pytest.raises(UserError, match="max_length 1"):
        prepare_jsonl(tmp_path / "d.jsonl", tokenizer, tmp_path / "s", max_length=1)


def test_cache_key_covers_what_changes_the_result(tmp_path):
    data = write_jsonl(tmp_path / "d.jsonl", [GOOD])
    other_data = write_jsonl(tmp_path / "e.jsonl", [GOOD, GOOD])
    same, changed = make_tokenizer(CHATML), make_tokenizer(CHATML)
    changed.add_tokens(["Hello"])

    def path(data=data, tokenizer=same, **options):
        options = {"max_length": 64, **options}
        store, report = prepared_store(data, tokenizer, root=tmp_path / "cache", **options)
        assert report.samples == len(store)
        return store.path

    paths = [
        path(),
        path(data=other_data),
        path(tokenizer=changed),
        path(tokenizer=make_tokenizer(LLAMA3)),
        path(max_length=65),
    ]
    assert len(set(paths)) == len(paths)
    assert path() == paths[0]
    assert path(data=write_jsonl(tmp_path / "copy.jsonl", [GOOD])) == paths[0]  # bytes, not names


def test_system_message_with_a_template_that_refuses_it(tmp_path):
    tokenizer = make_tokenizer(MISTRAL)
    data = write_jsonl(tmp_path / "d.jsonl", [[{"role": "system", "content": "s"}, *GOOD], GOOD])
    report = prepare_jsonl(data, tokenizer, tmp_path / "s", max_length=64)
    assert report.skipped == {"template refused the conversation": 1}
    assert "only user and assistant roles" in str(report)
