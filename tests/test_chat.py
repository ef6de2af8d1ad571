from __future__ import annotations

import inspect
import json
import sys

import pytest
from data_fixtures import CHATML, FAMILIES, LLAMA3, MISTRAL, THINKING, make_tokenizer

from dflash_ext.data.encode import RowEncoder, encode_row, identity
from dflash_ext.data.rows import ChatOptions, SkipRow
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
MALFORMED |= {
    "text is not UTF-8": [user(SURROGATE), assistant("b")],
    "assistant's content is empty": [user("hi"), assistant("")],
    "messages is not a list": "hello",
    "message is not an object": ["hello"],
    "content is not a string": [user(3), assistant("b")],
    "no assistant turn": [user("a")],
    "system message is not the first": [user("a"), {"role": "system", "content": "s"}],
    "tool call has no function name": [user("a"), assistant(None, tool_calls=[{"id": 1}])],
}


@pytest.mark.parametrize("reason", MALFORMED)
def test_each_malformed_row_has_its_own_reason(reason):
    encoder = RowEncoder(make_tokenizer(CHATML), ChatOptions())
    bad, good = encoder.encode([{"messages": MALFORMED[reason]}, {"messages": GOOD}])
    assert isinstance(bad, SkipRow)
    assert bad.reason == reason
    assert len(good) == 1


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
    with pytest.raises(UserError, match=f"{tmp_path / 'tok'} has no chat template"):
        encode(tokenizer, GOOD)
    # What needs no template does not ask for one.
    assert len(encode_row(tokenizer, {"text": "Hello there!"}, ChatOptions())) == 1

    class Slow:
        chat_template, is_fast, name_or_path = CHATML, False, "some/slow"

    with pytest.raises(UserError, match="some/slow reports no character offsets"):
        encode(Slow(), GOOD)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_length": 1}, "max_length 1"),
        ({"supervise": "first"}, "supervise 'first': expected one of all, last"),
        ({"reasoning": ""}, "reasoning"),
        ({"date": "today"}, "date 'today'"),
        ({"template_kwargs": "{"}, "is no JSON"),
        ({"template_kwargs": "[]"}, "expected a JSON object"),
    ],
)
def test_options_are_checked(changes, message):
    with pytest.raises(UserError, match=message):
        ChatOptions(**changes)


def test_identity_covers_what_changes_the_result():
    changed = make_tokenizer(CHATML)
    changed.add_tokens(["Hello"])
    base = make_tokenizer(CHATML)
    keys = [
        identity(base, ChatOptions()),
        identity(base, ChatOptions(max_length=65)),
        identity(base, ChatOptions(supervise="last")),
        identity(base, ChatOptions(reasoning="mask")),
        identity(base, ChatOptions(date="2026-01-02")),
        identity(base, ChatOptions(template_kwargs='{"a": 1}')),
        identity(changed, ChatOptions()),
        identity(make_tokenizer(LLAMA3), ChatOptions()),
    ]
    texts = [json.dumps(key, sort_keys=True) for key in keys]
    assert len(set(texts)) == len(texts)
    assert json.dumps(identity(make_tokenizer(CHATML), ChatOptions()), sort_keys=True) == texts[0]
    assert ChatOptions(**ChatOptions(max_length=7).key()) == ChatOptions(max_length=7)


def test_a_system_message_its_template_refuses():
    with pytest.raises(SkipRow, match=r"template refused.*only user and assistant roles"):
        encode(make_tokenizer(MISTRAL), [{"role": "system", "content": "s"}, *GOOD])


def test_an_answer_with_its_own_end_of_turn_is_refused():
    """What the tokenizer would read as the end of the turn cannot be text of it."""
    with pytest.raises(SkipRow, match="answer contains the end-of-turn token"):
        encode(make_tokenizer(CHATML), [user("a"), assistant("b<|im_end|>\nc")])


def test_an_unfinished_answer_is_supervised_without_an_end(family):
    name, tokenizer, _ = family
    (row,) = encode(tokenizer, [user("a"), assistant("Hello the", unfinished=True)])
    lead = " " if name == "mistral" else ""
    assert supervised(tokenizer, row) == f"{lead}Hello the"
    turns = [user("a"), assistant("Hello the", unfinished=True), user("b"), assistant("c")]
    with pytest.raises(SkipRow, match="unfinished answer is not the last"):
        encode(tokenizer, turns)


@pytest.mark.parametrize("gone", [True, False])
def test_renders_go_through_the_public_call_where_the_private_one_is_gone_or_differs(
    monkeypatch, gone
):
    """transformers may rename or change what we call directly; its public call stays right."""
    import transformers.utils.chat_template_utils as theirs

    tokenizer = make_tokenizer(THINKING)
    messages = [user("a"), assistant("first"), user("b"), assistant("second")]
    truth = encode(tokenizer, messages)
    if gone:
        # Their own code looks it up by name as well: under another name there, as in a rename.
        source = inspect.getsource(theirs.render_jinja_template)
        scope = {**vars(theirs), "_renamed": theirs._compile_jinja_template}
        exec(source.replace("_compile_jinja_template", "_renamed"), scope)
        base = sys.modules["transformers.tokenization_utils_base"]
        monkeypatch.setattr(base, "render_jinja_template", scope["render_jinja_template"])
        monkeypatch.delattr(theirs, "_compile_jinja_template")
    else:
        from dflash_ext.data import templates

        monkeypatch.setattr(templates.Renderer, "_template", lambda *_: _Other())
    encoder = RowEncoder(tokenizer, ChatOptions())
    (rows,) = encoder.encode([{"messages": messages}])
    assert encoder._finder._render._direct is False
    assert [r.ids.tolist() for r in rows] == [r.ids.tolist() for r in truth]
    assert [r.mask.tolist() for r in rows] == [r.mask.tolist() for r in truth]


class _Other:
    def render(self, **_):
        return "something else"


def test_many_rows_are_what_each_is_alone():
    rows = [{"messages": [user("é" * i), assistant(ANSWERS[i % 5])]} for i in range(20)]
    rows[7] = {"messages": []}
    rows[11] = {"text": "Hello there! " * 30}
    for template in (CHATML, THINKING):
        tokenizer = make_tokenizer(template)
        options = ChatOptions(max_length=100)
        together = RowEncoder(tokenizer, options).encode(rows)
        for row, found in zip(rows, together, strict=True):
            (alone,) = RowEncoder(tokenizer, options).encode([row])
            if isinstance(alone, SkipRow):
                assert str(found) == str(alone)
                continue
            assert [r.ids.tolist() for r in found] == [r.ids.tolist() for r in alone]
            assert [r.mask.tolist() for r in found] == [r.mask.tolist() for r in alone]
