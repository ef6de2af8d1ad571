"""What is supervised, over real chat templates: exactly the answer and its end of turn."""

from __future__ import annotations

import json

import pytest
from template_fixtures import FAMILIES, THINKERS, Family

from dflash_ext.data.encode import RowEncoder, encode_row
from dflash_ext.data.rows import ChatOptions, SkipRow

ANSWERS = [
    "Hello there!",
    "Naïve: 漢字 🙂\n\n- a\n- b",
    "```python\ndef f(x):\n    return x < 3\n```",
    "x",
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "description": "The time somewhere.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Where."}},
                "required": ["city"],
            },
        },
    }
]
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get_time", "arguments": '{"city": "Rome"}'},
}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


def encode(family: Family, row, **options):
    """(tokenizer, samples) of a row, or of a list of messages."""
    tokenizer = family.tokenizer()
    options = ChatOptions(template_kwargs=family.arguments, **options)
    return tokenizer, encode_row(tokenizer, row, options)


def supervised(family: Family, row, **options):
    tokenizer, rows = encode(family, row, **options)
    return [tokenizer.decode(row.ids[row.mask]) for row in rows]


@pytest.mark.parametrize("answer", ANSWERS)
def test_supervised_is_exactly_the_answer_and_its_end(family, answer):
    assert supervised(family, [user("What is it?"), assistant(answer)]) == [answer + family.end]


def test_in_front_of_the_answer_stand_the_prompt_and_the_boilerplate(family):
    tokenizer, (row,) = encode(family, [user("What is it?"), assistant("Hello there!")])
    before = tokenizer.decode(row.ids[: row.mask.argmax()])
    assert before.endswith(family.boilerplate)
    if "strftime_now" not in tokenizer.chat_template and not family.swallow:
        prompt = tokenizer.apply_chat_template(
            [user("What is it?")],
            tokenize=False,
            add_generation_prompt=True,
            **json.loads(family.arguments),
        )
        assert before == prompt + family.boilerplate


def test_several_turns(family):
    turns = [user("a"), assistant("first"), user("b"), assistant("second"), user("unanswered")]
    if family.system:
        turns = [{"role": "system", "content": "Be kind."}, *turns]
    tokenizer, rows = encode(family, turns)
    texts = [tokenizer.decode(row.ids[row.mask]) for row in rows]
    ends = [f"first{family.end}", f"second{family.end}"]
    assert texts == (ends if family.fans_out else ["".join(ends)])
    for row in rows:
        everything = tokenizer.decode(row.ids)
        assert "unanswered" not in everything
        assert ("Be kind." in everything) == family.system
    if family.fans_out:
        assert "second" not in tokenizer.decode(rows[0].ids)


def test_only_the_last_turn(family):
    turns = [user("a"), assistant("first"), user("b"), assistant("second")]
    assert supervised(family, turns, supervise="last") == [f"second{family.end}"]


# family -> (reasoning in front of the answer, as this template spells it)
THOUGHTS = {
    "qwen3": "<think>\nhm, yes\n</think>\n\n",
    "qwen3.5": "hm, yes\n</think>\n\n",  # the prompt has opened the block
    "gpt_oss": "<|channel|>analysis<|message|>hm, yes<|end|><|start|>assistant"
    "<|channel|>final<|message|>",
    "deepseek_r1": "hm, yes\n</think>\n\n",
    "qwq": "hm, yes\n</think>\n\n",
}


@pytest.mark.parametrize("name", THOUGHTS)
@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("reasoning", ["keep", "mask"])
def test_reasoning_is_kept_or_masked(name, inline, reasoning):
    family = {**FAMILIES, **THINKERS}[name]

    def thoughtful(text):
        if inline:
            return assistant(f"<think>\nhm, yes\n</think>\n\n{text}")
        return assistant(text, reasoning_content="hm, yes")

    turns = [user("a"), thoughtful("first"), user("b"), thoughtful("second")]
    lead = THOUGHTS[name] if reasoning == "keep" else ""
    tokenizer, rows = encode(family, turns, reasoning=reasoning)
    texts = [tokenizer.decode(row.ids[row.mask]) for row in rows]
    assert texts == [f"{lead}first{family.end}", f"{lead}second{family.end}"]
    # Masked or not, the model reads the reasoning of its own turn and of no earlier one.
    for row in rows:
        assert tokenizer.decode(row.ids).count("hm, yes") == 1


@pytest.mark.parametrize("name", ["chatml", "llama3", "qwen2.5", "gemma", "mistral_small_3.2"])
def test_reasoning_where_the_template_knows_none(name):
    family = FAMILIES[name]
    field = [user("a"), assistant("first", reasoning_content="hm, yes")]
    with pytest.raises(SkipRow, match="template leaves out the reasoning"):
        encode(family, field)
    assert supervised(family, field, reasoning="mask") == [f"first{family.end}"]
    inline = [user("a"), assistant("<think>\nhm, yes\n</think>\n\nfirst")]
    text = inline[1]["content"]
    assert supervised(family, inline) == [text + family.end]


@pytest.mark.parametrize("name", THINKERS)
def test_an_answer_without_the_reasoning_its_prompt_asks_for_is_refused(name):
    with pytest.raises(SkipRow, match=r"does not extend its prompt.*has no reasoning"):
        encode(THINKERS[name], [user("a"), assistant("first")])


@pytest.mark.parametrize("name", ["qwen3_no_thinking", "qwen3.5_no_thinking", "qwq_no_thinking"])
def test_reasoning_where_the_prompt_forbids_it_is_refused(name):
    for answer in (
        assistant("first", reasoning_content="hm"),
        assistant("<think>\nhm\n</think>\n\nfirst"),
    ):
        with pytest.raises(SkipRow, match=r"does not extend its prompt|leaves out"):
            encode(FAMILIES[name], [user("a"), answer])


# family -> how it spells the call; then comes its end of turn, or its own end of a call
CALLS = {
    "llama3": '{"name": "get_time", "parameters": {"city": "Rome"}}<|eot_id|>',
    "qwen2.5": '<tool_call>\n{"name": "get_time", "arguments": {"city": "Rome"}}\n</tool_call>'
    "<|im_end|>",
    "qwen3": '<tool_call>\n{"name": "get_time", "arguments": {"city": "Rome"}}\n</tool_call>'
    "<|im_end|>",
    "qwen3.5": "<tool_call>\n<function=get_time>\n<parameter=city>\nRome\n</parameter>\n"
    "</function>\n</tool_call><|im_end|>",
    "mistral_nemo": '[TOOL_CALLS][{"name": "get_time", "arguments": {"city": "Rome"}, "id": '
    '"abcdefghi"}]</s>',
    "mistral_small_3.2": '[TOOL_CALLS]get_time[CALL_ID]abcdefghi[ARGS]{"city": "Rome"}</s>',
    "gpt_oss": " to=functions.get_time<|channel|>commentary json<|message|>"
    '{"city": "Rome"}<|call|>',
    "deepseek_v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>"
    '{"city": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("as_object", [True, False])
def test_tool_calls_are_the_models_and_results_are_not(name, as_object):
    family = FAMILIES[name]
    function = {"name": "get_time", "arguments": {"city": "Rome"}}
    call = {**CALL, "function": function} if as_object else CALL
    turns = [
        user("What time is it?"),
        assistant(None, tool_calls=[call]),
        {"role": "tool", "content": "5 pm", "tool_call_id": "abcdefghi", "name": "get_time"},
        assistant("It is 5."),
    ]
    tokenizer, rows = encode(family, {"messages": turns, "tools": TOOLS})
    text = "".join(tokenizer.decode(row.ids[row.mask]) for row in rows)
    assert text == f"{CALLS[name]}It is 5.{family.end}"
    everything = tokenizer.decode(rows[-1].ids)
    assert "5 pm" in everything
    if name != "deepseek_v3.1":  # its template shows no tools
        assert "The time somewhere." in everything


@pytest.mark.parametrize("name", ["phi_3.5", "smollm2", "zephyr"])
def test_templates_without_tools_refuse_calls(name):
    turns = [user("a"), assistant("", tool_calls=[CALL])]
    with pytest.raises(SkipRow, match=r"leaves out tool calls|refused"):
        encode(FAMILIES[name], turns)


def test_the_date_is_the_options_not_today():
    family = FAMILIES["llama3"]
    turns = [user("a"), assistant("first")]
    texts = []
    for date in ("2026-01-01", "2031-12-24"):
        tokenizer, (row,) = encode(family, turns, date=date)
        texts.append(tokenizer.decode(row.ids))
    assert "Today Date: 01 Jan 2026" in texts[0]
    assert "Today Date: 24 Dec 2031" in texts[1]


def test_tokens_by_lengths_and_by_offsets_agree(family):
    """The fast way to find a span's tokens against the one that asks the tokenizer."""
    tokenizer = family.tokenizer()
    options = ChatOptions(template_kwargs=family.arguments)
    fast, slow = RowEncoder(tokenizer, options), RowEncoder(tokenizer, options)
    slow._lengths = None
    rows = [[user("hé 漢"), assistant(a), user(a), assistant("b")] for a in ANSWERS]
    for ours, theirs in zip(fast.encode(rows), slow.encode(rows)):
        assert [r.ids.tolist() for r in ours] == [r.ids.tolist() for r in theirs]
        assert [r.mask.tolist() for r in ours] == [r.mask.tolist() for r in theirs]
