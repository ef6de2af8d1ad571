"""The target's own answers, through a server that may misbehave."""

from __future__ import annotations

import json
import multiprocessing
import random
import threading
import time
from pathlib import Path

import pytest
from busy_machine import PATIENCE_SECONDS, wait_until
from data_fixtures import CHATML, make_tokenizer
from fake_endpoint import FakeEndpoint, completion, echo
from regenerate_cases import (  # noqa: F401
    answers_of,
    assistant,
    prompts,
    rows_of,
    run,
    short_pauses,
    user,
    write,
)

from dflash_ext import regenerate as command
from dflash_ext.data.encode import encode_row
from dflash_ext.data.from_endpoint import KEY_VARIABLE
from dflash_ext.data.journal import Journal
from dflash_ext.data.rows import ChatOptions
from dflash_ext.errors import UserError
from dflash_ext.regenerate import Options


def test_rows_are_in_the_order_of_the_prompts_whoever_answers_first(tmp_path):
    chance = random.Random(0)

    def reply(number, body):
        time.sleep(chance.random() * 0.05)
        return echo(body)

    source = prompts(tmp_path, 40)
    for name, concurrency, answerer in (("a", 1, None), ("b", 16, reply)):
        with FakeEndpoint(answerer) as server:
            report = run(
                source, tmp_path / f"{name}.jsonl", endpoint=server.url, concurrency=concurrency
            )
        assert (report.rows, report.answered, report.answers, report.tokens) == (40, 40, 40, 120)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert answers_of(tmp_path / "a.jsonl") == [f"[u:w{i}]" for i in range(40)]
    assert not list(tmp_path.glob("*.part"))


def test_concurrency_is_bounded_and_used(tmp_path):
    running, most, six = set(), [], threading.Barrier(6)

    def reply(number, body):
        running.add(number)
        most.append(len(running))
        if number < 6:
            six.wait(PATIENCE_SECONDS)  # all of them are asked before one is answered
            time.sleep(0.1)  # for a seventh, which must not come
        running.discard(number)
        return echo(body)

    with FakeEndpoint(reply) as server:
        run(prompts(tmp_path, 30), tmp_path / "o.jsonl", endpoint=server.url, concurrency=6)
    assert max(most) == 6


def test_settings_reach_the_server_and_the_rows(tmp_path):
    settings = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 11, "seed": 5}
    with FakeEndpoint() as server:
        source = write(tmp_path / "p.jsonl", [[user("a")], [user("b")], [user("a")]])
        run(
            source,
            tmp_path / "o.jsonl",
            endpoint=server.url,
            template_kwargs='{"enable_thinking": false}',
            **settings,
        )
        seeds = {body["messages"][0]["content"] + str(body["seed"]) for body in server.requests}
        assert len(seeds) == 3  # also the two equal prompts are sampled apart
        for body in server.requests:
            assert body["chat_template_kwargs"] == {"enable_thinking": False}
            expected = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 11, "model": "tiny"}
            assert {name: body[name] for name in expected} == expected
    recorded = {"model": "tiny", **settings, "template_kwargs": '{"enable_thinking": false}'}
    assert [row["sampling"] for row in rows_of(tmp_path / "o.jsonl")] == [recorded] * 3


def test_every_turn_is_asked_on_top_of_the_models_own_answers(tmp_path):
    turns = [
        {"role": "system", "content": "s"},
        user("a"),
        assistant("someone else's"),
        user("b"),
        assistant(None),  # not needed, so it need not be any good
        user("c"),
    ]
    with FakeEndpoint() as server:
        source = write(tmp_path / "p.jsonl", [{"messages": turns}])
        report = run(source, tmp_path / "o.jsonl", endpoint=server.url)
    assert "someone else's" not in str(server.requests)
    (row,) = rows_of(tmp_path / "o.jsonl")
    first = "[s:s | u:a]"
    second = f"[s:s | u:a | a:{first} | u:b]"
    third = f"[s:s | u:a | a:{first} | u:b | a:{second} | u:c]"
    contents = [m["content"] for m in row["messages"]]
    assert contents == ["s", "a", first, "b", second, "c", third]
    assert (report.answered, report.answers) == (1, 3)


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def test_what_tools_said_is_context_and_only_the_end_is_asked(tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    turns = [
        user("a"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "1"},
        assistant("someone else's"),
    ]
    with FakeEndpoint(lambda *_: completion("It is 5.")) as server:
        source = write(tmp_path / "p.jsonl", [{"messages": turns, "tools": TOOLS}])
        run(source, tmp_path / "o.jsonl", endpoint=server.url)
        (body,) = server.requests
    assert body["tools"] == TOOLS
    assert body["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"x": 1}'
    assert len(body["messages"]) == 3
    (row,) = rows_of(tmp_path / "o.jsonl")
    assert row["completion"] == [assistant("It is 5.")]
    assert [m["role"] for m in row["prompt"]] == ["user", "assistant", "tool"]


def test_a_call_ends_the_conversation_because_nobody_here_runs_it(tmp_path):
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    reply = completion("", finish="tool_calls", tool_calls=calls)
    with FakeEndpoint(lambda *_: reply) as server:
        turns = [user("a"), assistant("x"), user("b")]
        source = write(tmp_path / "p.jsonl", [{"messages": turns, "tools": TOOLS}])
        run(source, tmp_path / "o.jsonl", endpoint=server.url)
        assert len(server.requests) == 1
    (row,) = rows_of(tmp_path / "o.jsonl")
    assert [m["role"] for m in row["messages"]] == ["user", "assistant"]
    assert row["messages"][1]["tool_calls"] == calls


def test_an_answer_cut_by_max_tokens_is_supervised_without_an_end_of_turn(tmp_path):
    with FakeEndpoint(lambda *_: completion("Hello the", finish="length")) as server:
        report = run(prompts(tmp_path, 1), tmp_path / "o.jsonl", endpoint=server.url)
    assert report.unfinished == 1
    (row,) = rows_of(tmp_path / "o.jsonl")
    tokenizer = make_tokenizer(CHATML)
    (sample,) = encode_row(tokenizer, row, ChatOptions())
    assert tokenizer.decode(sample.ids[sample.mask]) == "Hello the"


def test_rows_that_cannot_be_asked_or_are_refused_have_their_reasons(tmp_path):
    def reply(number, body):
        content = body["messages"][-1]["content"]
        if content == "long":
            return 400, {}, b'{"error": {"message": "context length exceeded"}}'
        return completion("" if content == "mute" else "yes")

    rows = [
        [user("good")],
        [user("long")],
        [user("mute")],
        [],
        [assistant("a")],
        {"messages": [{"role": "system", "content": "s"}]},
        {"txt": "a"},
        {"prompt": "good too"},
        [user("a"), user("b")],
        [user([{"type": "image"}])],
        7,
        [user("half \ud83d")],
    ]
    with FakeEndpoint(reply) as server:
        report = run(write(tmp_path / "p.jsonl", rows), tmp_path / "o.jsonl", endpoint=server.url)
    assert report.rows == report.answered + sum(report.skipped.values()) == len(rows)
    assert report.answered == 2
    assert report.skipped == {
        "no answer could be had": 2,
        "messages is empty": 1,
        "no user turn": 2,
        "row has no known columns": 1,
        "roles do not alternate": 1,
        "content has a part that is not text": 1,
        "row is not an object": 1,
        "text is not UTF-8": 1,
    }
    assert "row 2" in report.examples["no answer could be had"]
    assert "context length exceeded" in report.examples["no answer could be had"]
    assert answers_of(tmp_path / "o.jsonl") == ["yes", "yes"]


def test_nothing_answered_is_an_error_and_no_file(tmp_path):
    source = prompts(tmp_path, 3)
    with (
        FakeEndpoint(lambda *_: (400, {}, b"no")) as server,
        pytest.raises(UserError, match=r"0 of 3 rows answered: 3 no answer .* HTTP 400 no"),
    ):
        run(source, tmp_path / "o.jsonl", endpoint=server.url)
    assert not (tmp_path / "o.jsonl").exists()


def test_a_dead_endpoint_is_an_error_and_a_later_run_goes_on(tmp_path):
    source, out = prompts(tmp_path, 60), tmp_path / "o.jsonl"

    def dies(number, body):
        return echo(body) if int(body["messages"][0]["content"][1:]) < 25 else (503, {}, b"")

    options = {"attempts": 2, "concurrency": 4}
    with (
        FakeEndpoint(dies) as server,
        pytest.raises(UserError, match=r"HTTP 503; \d+ conversations are kept"),
    ):
        run(source, out, endpoint=server.url, **options)
    assert not out.exists()
    kept = out.with_name("o.jsonl.part").read_bytes().count(b"\n") - 1
    assert 25 - 3 <= kept <= 25  # but for what three others were at while one met nothing else
    with FakeEndpoint() as server:
        run(source, out, endpoint=server.url, **options)
        assert len(server.requests) == 60 - kept  # nothing twice
    assert answers_of(out) == [f"[u:w{i}]" for i in range(60)]


def test_one_conversation_the_server_dies_of_does_not_hold_up_the_others(tmp_path):
    source, out = prompts(tmp_path, 20), tmp_path / "o.jsonl"

    def poisoned(number, body):
        return (500, {}, b"") if body["messages"][0]["content"] == "w7" else echo(body)

    with FakeEndpoint(poisoned) as server:
        report = run(source, out, endpoint=server.url, attempts=2, concurrency=3)
    assert report.answered == 19
    assert report.skipped == {command.NO_ANSWER: 1}
    assert "w7" not in str(answers_of(out))
    with FakeEndpoint() as server:  # again: only that one is asked
        assert run(source, out, endpoint=server.url).answered == 20
        assert len(server.requests) == 1
    assert answers_of(out) == [f"[u:w{i}]" for i in range(20)]
    with pytest.raises(UserError, match="exists already"):
        run(source, out, endpoint=server.url)


def test_kill_and_resume_equal_an_uninterrupted_run(tmp_path):
    source, out = prompts(tmp_path, 60), tmp_path / "o.jsonl"
    partial = tmp_path / "o.jsonl.part"

    killed = threading.Event()

    def held_up(number, body):
        if number >= 20:  # so that it cannot have ended before it is killed
            killed.wait(PATIENCE_SECONDS)
        return echo(body)

    with FakeEndpoint(held_up) as server:
        arguments = [str(source), "--out", str(out), "--endpoint", server.url]
        arguments += ["--concurrency", "2", "--max-tokens", "16"]
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=command.main, args=(arguments,))
        process.start()
        wait_until(lambda: len(server.requests) == 22)  # twenty are answered, two under way
        process.kill()
        process.join()
        killed.set()
        done = partial.read_bytes().count(b"\n") - 1
        partial.write_bytes(partial.read_bytes() + b'{"key": "half a li')
        asked = len(server.requests)
        assert (done, asked) == (20, 22)
        report = run(source, out, endpoint=server.url, concurrency=2)
        assert len(server.requests) == asked + 60 - done
    assert report.answered == 60
    with FakeEndpoint() as server:
        run(source, tmp_path / "whole.jsonl", endpoint=server.url)
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_journal_of_other_settings_or_another_process_is_an_error(tmp_path):
    source, out = prompts(tmp_path, 30), tmp_path / "o.jsonl"
    with FakeEndpoint(lambda n, b: echo(b) if n < 5 else (401, {}, b"")) as server:
        with pytest.raises(UserError, match=r"HTTP 401.*API key"):
            run(source, out, endpoint=server.url, concurrency=1)
        with pytest.raises(UserError, match="begun with other settings"):
            run(source, out, endpoint=server.url, temperature=1.0)
    part = out.with_name("o.jsonl.part")
    header = json.loads(part.read_text().splitlines()[0])
    journal = Journal(part, header["settings"])
    with pytest.raises(UserError, match="another process is writing"):
        Journal(part, header["settings"])
    assert len(journal) == 5
    journal.close()
    assert part.stat().st_mode & 0o077 == 0  # prompts are the user's own


def test_the_key_is_read_from_the_environment_and_written_nowhere(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(KEY_VARIABLE, "sk-very-secret")
    with FakeEndpoint() as server:
        out = tmp_path / "o.jsonl"
        arguments = [str(prompts(tmp_path, 2)), "--endpoint", server.url, "--out", str(out)]
        assert command.main(arguments) == 0
        assert server.headers[0]["Authorization"] == "Bearer sk-very-secret"
    shown = capsys.readouterr()
    written = "".join(p.read_text() for p in tmp_path.iterdir())
    assert "sk-very-secret" not in written + shown.out + shown.err
    saved = json.loads((tmp_path / "o.report.json").read_text())
    assert saved["report"]["answered"] == 2
    assert saved["options"]["endpoint"] == server.url
    assert "2 rows: 2 answered" in shown.out


def test_the_only_model_is_taken_and_several_are_a_question(tmp_path):
    source = prompts(tmp_path, 1)
    with FakeEndpoint() as server:
        run(source, tmp_path / "o.jsonl", endpoint=server.url, model=None)
        assert server.requests[0]["model"] == "tiny"
        server.models = ["a", "b"]
        with pytest.raises(UserError, match="serves a, b; name one"):
            run(source, tmp_path / "p2.jsonl", endpoint=server.url, model=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": ()}, "no source"),
        ({"endpoint": None}, "either --endpoint"),
        ({"target": "x"}, "either --endpoint"),
        ({"endpoint": None, "target": "x", "model": "y"}, "--model names"),
        ({"out": Path("x.json")}, "ends with .jsonl"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"concurrency": 0}, "concurrency"),
        ({"timeout": 0.0}, "timeout"),
        ({"attempts": 0}, "attempts"),
        ({"limit": 0}, "limit"),
        ({"template_kwargs": "[]"}, "template_kwargs"),
    ],
)
def test_options_are_checked(changes, message):
    good = {"sources": ("a",), "out": Path("x.jsonl"), "endpoint": "http://localhost/v1"}
    with pytest.raises(UserError, match=message):
        Options(**{**good, **changes})
