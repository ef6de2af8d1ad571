"""One render must prove what several say, or say nothing."""

from __future__ import annotations

import functools
import json

import pytest
from data_fixtures import CHATML, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from template_fixtures import FAMILIES

from dflash_ext.data.append_only import AppendOnly
from dflash_ext.data.encode import RowEncoder
from dflash_ext.data.formats import Conversation
from dflash_ext.data.rows import ChatOptions, SkipRow
from dflash_ext.data.templates import Renderer

DATE = "2026-01-01"


def talk(*texts, system=None):
    messages = [{"role": "system", "content": system}] if system is not None else []
    roles = ("user", "assistant")
    return messages + [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def shown(template_or_tokenizer, messages, arguments="{}", tools=None):
    tokenizer = template_or_tokenizer
    if isinstance(tokenizer, str):
        tokenizer = make_tokenizer(tokenizer)
    renderer = Renderer(tokenizer, date=DATE, arguments=json.loads(arguments))
    return renderer, AppendOnly(renderer).show(Conversation(messages, tools, 0))


def check(renderer, found, messages, tools=None):
    """Every prompt and every text that `found` claims, against its own render."""
    assert found.text == renderer(messages, generation=False, tools=tools)
    for i in range(1, len(messages)):
        prompt = renderer(messages[:i], generation=True, tools=tools)
        assert prompt == found.text[: found.starts[i]] + found.header
        text = renderer(messages[:i], generation=False, tools=tools)
        assert text == found.text[: found.starts[i]] + found.footer


@pytest.mark.parametrize("name", ["chatml", "smollm2", "gemma", "phi_3.5", "qwen2.5"])
def test_what_is_claimed_is_what_the_renders_say(name):
    system = "Be kind." if FAMILIES[name].system else None
    messages = talk("a", "b", "c", "d <x>", "e", "f", system=system)
    renderer, found = shown(FAMILIES[name].tokenizer(), messages)
    assert found is not None
    check(renderer, found, messages)


@pytest.mark.parametrize("name", ["zephyr", "qwen3", "qwen3.5", "gpt_oss", "mistral_nemo"])
def test_templates_that_look_ahead_or_back_over_all_go_the_long_way(name):
    family = FAMILIES[name]
    assert shown(family.tokenizer(), talk("a", "b", "c", "d"), family.arguments)[1] is None


def test_qwen_looks_ahead_only_where_tools_speak():
    family = FAMILIES["qwen2.5"]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    renderer, found = shown(family.tokenizer(), talk("a", "b", "c", "d"), tools=tools)
    assert found is not None
    check(renderer, found, talk("a", "b", "c", "d"), tools)
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "b"},
    ]
    assert shown(family.tokenizer(), messages, tools=tools)[1] is None


LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
TAIL = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
END = "{% endfor %}"
TRICKY = {
    "the last turn is special": f"{LOOP}{{% if loop.last %}}!{{% endif %}}{END}{TAIL}",
    "loop by item": f"{LOOP}{{% if loop['last'] %}}!{{% endif %}}{END}{TAIL}",
    "loop by a name": f"{{% set n = 'last' %}}{LOOP}{{{{ loop[n] }}}}{END}{TAIL}",
    "the next turn is read": f"{LOOP}{{% if loop.nextitem is defined %}}!{{% endif %}}{END}{TAIL}",
    "counts down": f"{LOOP}{{{{ loop.revindex }}}}{END}{TAIL}",
    "counts all": f"{LOOP}{{{{ loop.length }}}}{END}{TAIL}",
    "length": f"{LOOP}{{{{ messages | length }}}}{END}{TAIL}",
    "length before": f"{{{{ messages | length }}}}{LOOP}{END}{TAIL}",
    "the last message": f"{LOOP}{{{{ messages[-1].content }}}}{END}{TAIL}",
    "the last by filter": f"{LOOP}{{{{ (messages | last).content }}}}{END}{TAIL}",
    "another message": f"{LOOP}{{{{ messages[1].content }}}}{END}{TAIL}",
    "one ahead": f"{LOOP}{{{{ (messages[loop.index0 + 1] or m).content }}}}{END}{TAIL}",
    "a slice's end": f"{LOOP}{{{{ messages[:2] | length }}}}{END}{TAIL}",
    "all but the first": "{{ messages[0].content }}{% for m in messages[1:] %}<|im_start|>"
    "{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + TAIL,
    "a slice that may be empty": "{% if messages[1:] %}more{% endif %}" + LOOP + END + TAIL,
    "reversed": "{% for m in messages[::-1] %}{{ m.role }}{% endfor %}" + LOOP + END + TAIL,
    "reversed by filter": "{% for m in messages | reverse %}{{ m.role }}{% endfor %}"
    + LOOP
    + END
    + TAIL,
    "read twice": "{% for m in messages %}{{ m.role }}{% endfor %}" + LOOP + END + TAIL,
    "read twice, silently": "{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}" + LOOP + END + TAIL,
    "a filter before": "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    + LOOP
    + END
    + TAIL,
    "printed": "{{ messages }}" + LOOP + END + TAIL,
    "as JSON": "{{ messages | tojson }}" + LOOP + END + TAIL,
    "compared": "{% if messages == [] %}!{% endif %}" + LOOP + END + TAIL,
    "contained": "{% if messages[0] in messages %}!{% endif %}" + LOOP + END + TAIL,
    "joined": "{% for m in messages + [] %}{{ m.content }}<|im_end|>{% endfor %}" + TAIL,
    "the tail counts": "{% set ns = namespace(n=0) %}"
    + LOOP
    + "{% set ns.n = ns.n + 1 %}"
    + END
    + "{% if ns.n > 2 %}!{% endif %}"
    + TAIL,
    "the tail reads": LOOP + END + "{{ messages[0].content }}" + TAIL,
    "the tail calls": "{% macro f() %}{{ messages | length }}{% endmacro %}"
    + LOOP
    + END
    + "{{ f() }}"
    + TAIL,
    "prompt in the loop": LOOP + "{% if add_generation_prompt %}!{% endif %}" + END + TAIL,
    "prompt before": "{% if add_generation_prompt %}!{% endif %}" + LOOP + END + TAIL,
    "prompt by another name": "{% set p = add_generation_prompt %}"
    + LOOP
    + "{% if p %}!{% endif %}"
    + END
    + TAIL,
    "prompt in a macro": "{% macro f() %}{{ add_generation_prompt }}{% endmacro %}"
    + LOOP
    + "{{ f() }}"
    + END
    + TAIL,
    "by another name": "{% set ms = messages %}{% for m in ms %}{{ m.content }}<|im_end|>"
    "{% if loop.last %}!{% endif %}{% endfor %}" + TAIL,
    "in a namespace": "{% set ns = namespace(ms=messages) %}{% for m in ns.ms %}{{ m.content }}"
    "<|im_end|>{% if loop.last %}!{% endif %}{% endfor %}" + TAIL,
    "in a with": "{% with ms = messages %}{% for m in ms %}{{ m.content }}<|im_end|>"
    "{% if loop.last %}!{% endif %}{% endfor %}{% endwith %}" + TAIL,
    "in a macro's argument": "{% macro f(ms) %}{% for m in ms %}{{ m.content }}<|im_end|>"
    "{% if loop.last %}!{% endif %}{% endfor %}{% endmacro %}{{ f(messages) }}" + TAIL,
    "loop as an argument": "{% macro f(l) %}{{ l.last }}{% endmacro %}"
    + LOOP
    + "{{ f(loop) }}"
    + END
    + TAIL,
    "in a set block": "{% set all %}" + LOOP + END + "{% endset %}{{ all }}" + TAIL,
    "in a condition with more behind": "{% if true %}"
    + LOOP
    + END
    + "{{ messages | length }}{% endif %}"
    + TAIL,
    "otherwise": "{% for m in messages if m.role == 'assistant' %}{{ m.content }}<|im_end|>"
    "{% else %}nothing{% endfor %}" + TAIL,
    "some only": "{% for m in messages if m.role == 'assistant' %}{{ m.content }}<|im_end|>"
    "{% endfor %}" + TAIL,
    "in pairs": "{% for pair in messages | batch(2) %}{% for m in pair %}{{ m.content }}<|im_end|>"
    "{% if loop.last %}!{% endif %}{% endfor %}{% endfor %}" + TAIL,
    "earlier turns differ": "{% for m in messages %}{{ m.content if loop.last else 'old' }}"
    "<|im_end|>{% endfor %}" + TAIL,
    "a default for the prompt": "{% if not add_generation_prompt is defined %}"
    "{% set add_generation_prompt = false %}{% endif %}" + LOOP + END + TAIL,
    "the prompt's other side": LOOP + END + TAIL.replace("{% endif %}", "{% else %}?{% endif %}"),
    "state between turns": "{% set ns = namespace(n=0) %}"
    + LOOP
    + "{% set ns.n = ns.n + 1 %}{{ ns.n }}"
    + END
    + TAIL,
    "looks back": LOOP
    + "{{ loop.previtem.role if loop.previtem else '' }}{{ loop.index }}"
    + END
    + TAIL,
    "no loop": "{{ messages[0].content }}<|im_end|>" + TAIL,
    "nested": LOOP
    + "{% for c in m.content %}{{ c }}{% if loop.last %}.{% endif %}{% endfor %}"
    + END
    + TAIL,
}
PROVEN = {
    "all but the first",
    "some only",
    "a default for the prompt",
    "the prompt's other side",
    "state between turns",
    "looks back",
}


@pytest.mark.parametrize("name", TRICKY)
def test_tricky_templates_are_right_or_not_claimed(name):
    messages = talk("a", "b", "c", "d", "e", "f")
    renderer, found = shown(TRICKY[name], messages)
    assert (found is not None) == (name in PROVEN)
    if found is not None:
        check(renderer, found, messages)


def test_a_template_that_fails_says_so_the_long_way():
    template = CHATML + "{{ raise_exception('never') }}"
    assert shown(template, talk("a", "b"))[1] is None


@functools.cache
def encoders(name):
    """(as usual, always the long way) of a family, both with a frame learnt."""
    family = FAMILIES[name]
    made = [
        RowEncoder(family.tokenizer(), ChatOptions(template_kwargs=family.arguments)) for _ in "ab"
    ]
    for encoder in made:
        encoder.encode([{"messages": talk("x", "y", "z", "w")}])
    made[1]._finder._append_only.show = lambda _: None
    return made


@given(
    texts=st.lists(
        st.sampled_from(["a", " b ", "", "\n", "é", "<|im_end|>", "</think>x"]), min_size=2
    ).map(lambda texts: texts[: len(texts) // 2 * 2]),
    system=st.sampled_from([None, "s"]),
    name=st.sampled_from(sorted(FAMILIES)),
)
@settings(max_examples=60)
def test_the_short_way_and_the_long_way_agree(texts, system, name):
    short, long = encoders(name)
    row = {"messages": talk(*texts, system=system)}
    (ours,), (theirs,) = short.encode([row]), long.encode([row])
    if isinstance(theirs, SkipRow):
        assert str(ours) == str(theirs)
        return
    assert [r.ids.tolist() for r in ours] == [r.ids.tolist() for r in theirs]
    assert [r.mask.tolist() for r in ours] == [r.mask.tolist() for r in theirs]


def test_one_render_a_row(monkeypatch):
    family = FAMILIES["smollm2"]
    encoder = RowEncoder(family.tokenizer(), ChatOptions())
    encoder.encode([{"messages": talk("a", "b")}])
    calls = []
    renderer = encoder._finder._render
    stream = renderer.stream
    monkeypatch.setattr(renderer, "stream", lambda *a, **k: calls.append(1) or stream(*a, **k))
    monkeypatch.setattr(type(renderer), "__call__", lambda *_, **__: 1 / 0)
    (rows,) = encoder.encode([{"messages": talk(*"abcdefgh")}])
    assert len(calls) == 1
    assert rows[0].mask.sum() == 8  # four letters, four ends
