"""The target's own answers, through a server that misbehaves, a real one, and in process."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from data_fixtures import CHATML, THINKING, make_tokenizer, make_word_tokenizer, tiny_model
from fake_endpoint import FakeEndpoint, completion, echo

from dflash_ext import regenerate as command
from dflash_ext.data import endpoint as endpoint_module
from dflash_ext.data.encode import encode_row
from dflash_ext.data.from_endpoint import KEY_VARIABLE
from dflash_ext.data.journal import Journal
from dflash_ext.data.rows import ChatOptions
from dflash_ext.data.store import StoreWriter
from dflash_ext.errors import UserError
from dflash_ext.regenerate import Options, regenerate


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(endpoint_module, "_FIRST_PAUSE", 0.01)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompts(folder, count=20):
    return write(folder / "p.jsonl", [{"messages": [user(f"w{i}")]} for i in range(count)])


def run(source, out, **options):
    options = {"model": "tiny" if "endpoint" in options else None, "max_tokens": 16, **options}
    return regenerate(Options(sources=(str(source),), out=out, **options), lambda *_: None)


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers_of(path):
    return [row["messages"][-1]["content"] for row in rows_of(path)]


def test_rows_are_in_the_order_of_the_prompts_whoever_answers_first(tmp_path):
    chance = random.Random(0)

    def reply(number, body):
        time.sleep(chance.random() * 0.05)
        return echo(body)

    source = prompts(tmp_path, 40)
    for name, concurrency in (("a", 1), ("b", 16)):
        with FakeEndpoint(reply) as server:
            report = run(
                source, tmp_path / f"{name}.jsonl", endpoint=server.url, concurrency=concurrency
            )
        assert (report.rows, report.answered, report.answers, report.tokens) == (40, 40, 40, 120)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert answers_of(tmp_path / "a.jsonl") == [f"[u:w{i}]" for i in range(40)]
    assert not list(tmp_path.glob("*.part"))


def test_concurrency_is_bounded_and_used(tmp_path):
    running, most = set(), []

    def reply(number, body):
        running.add(number)
        most.append(len(running))
        time.sleep(0.03)
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
        return echo(body) if number < 25 else (503, {}, b"")

    options = {"attempts": 2, "concurrency": 4}
    with (
        FakeEndpoint(dies) as server,
        pytest.raises(UserError, match=r"HTTP 503; \d+ conversations are kept"),
    ):
        run(source, out, endpoint=server.url, **options)
    assert not out.exists()
    kept = out.with_name("o.jsonl.part").read_bytes().count(b"\n") - 1
    assert 25 - 4 <= kept <= 25  # but for what was still under way
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

    def slow(number, body):
        time.sleep(0.02)
        return echo(body)

    with FakeEndpoint(slow) as server:
        arguments = ["--endpoint", server.url, "--concurrency", "2", "--max-tokens", "16"]
        process = subprocess.Popen(
            [sys.executable, "-m", "dflash_ext.regenerate", str(source), "--out", str(out)]
            + arguments,
            stdout=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 60
        while not partial.exists() or partial.read_bytes().count(b"\n") < 10:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        done = partial.read_bytes().count(b"\n") - 1
        partial.write_bytes(partial.read_bytes() + b'{"key": "half a li')
        asked = len(server.requests)
        assert 10 <= done + 1 <= asked < 60
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


def test_a_journal_with_nothing_in_it_binds_nobody(tmp_path):
    path = tmp_path / "j"
    for content in (b"", b'{"settings": {"a": 1}}\n', b'{"settings": {"a"'):
        path.write_bytes(content)
        journal = Journal(path, {"a": 2})
        journal.add("k", value=1)
        journal.close()
        again = Journal(path, {"a": 2})
        assert (len(again), again["k"]["value"]) == (1, 1)
        again.close()
    path.write_bytes(path.read_bytes() + b'{"key": "l", "value": 2}\n{"key": "m"')
    journal = Journal(path, {"a": 2})
    assert ("k" in journal, "l" in journal, "m" in journal) == (True, True, False)
    journal.add("n", value=3)
    assert (journal["l"]["value"], journal["n"]["value"]) == (2, 3)
    journal.close(remove=True)
    assert not path.exists()


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


# In process ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """(folder, model, tokenizer) of a random target whose turns end now and then."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = make_word_tokenizer()
    model = tiny_model(tokenizer, end_bias=5.8)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, model, tokenizer


def naive_answer(model, ids, stop, most=16):
    """Greedy decoding as slow and plain as it gets: the whole text for every token."""
    ids = list(ids)
    start = len(ids)
    with torch.inference_mode():
        while len(ids) - start < most and (len(ids) == start or ids[-1] != stop):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[start:]


def in_process(source, out, folder, **options):
    options = {"dtype": "fp32", "device": "cpu", "batch_size": 4, **options}
    return run(source, out, target=str(folder), **options)


def various(folder, count=21):
    rows = [
        [user(" ".join(f"w{(i * 7 + j) % 40}" for j in range(1 + i % 9)))] for i in range(count)
    ]
    return write(folder / "p.jsonl", rows)


def prompt_ids(tokenizer, messages):
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False).input_ids


def test_in_process_answers_are_the_greedy_ones(target, tmp_path):
    folder, model, tokenizer = target
    source = various(tmp_path)
    report = in_process(source, tmp_path / "o.jsonl", folder)
    rows = rows_of(tmp_path / "o.jsonl")
    assert report.answered == len(rows) == 21
    ended = 0
    for row, messages in zip(rows, rows_of(source)):
        prompt = prompt_ids(tokenizer, messages)
        answer = naive_answer(model, prompt, tokenizer.eos_token_id)
        assert row["ids"] == prompt + answer
        assert row["mask"] == [0] * len(prompt) + [1] * len(answer)
        ended += answer[-1] == tokenizer.eos_token_id
    assert 0 < ended < 21, "the case should have ended and cut answers"
    assert report.unfinished == 21 - ended
    assert rows[0]["sampling"]["temperature"] == 0
    (sample,) = encode_row(tokenizer, rows[0], ChatOptions())
    assert sample.ids.tolist() == rows[0]["ids"]


def test_in_process_turns_are_one_sample_while_they_extend_each_other(target, tmp_path):
    folder, model, tokenizer = target
    rows = [
        [user(f"w{i} w2"), assistant("-"), user("w3"), assistant("-"), user("w4 w5 w6")]
        for i in range(10)
    ]
    in_process(write(tmp_path / "p.jsonl", rows), tmp_path / "o.jsonl", folder)
    stop, most = tokenizer.eos_token_id, 0
    for row, turns in zip(rows_of(tmp_path / "o.jsonl"), rows, strict=True):
        # Truth: plain decodes, each on top of the text of the ones before.
        messages, ids, mask = [], [], []
        for question in turns[::2]:
            messages.append(question)
            prompt = prompt_ids(tokenizer, messages)
            answer = naive_answer(model, prompt, stop)
            mask += [0] * (len(prompt) - len(ids)) + [1] * len(answer)
            assert prompt[: len(ids)] == ids
            ids = prompt + answer
            if answer[-1] != stop:
                break
            messages.append(assistant(tokenizer.decode(answer[:-1])))
        assert (row["ids"], row["mask"]) == (ids, mask)
        most = max(most, len(messages))
    assert most > 2, "the case should have several turns"


def test_in_process_sampling_depends_on_the_seed_alone(target, tmp_path):
    folder, *_ = target
    source = various(tmp_path)
    texts = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        in_process(source, tmp_path / f"{name}.jsonl", folder, temperature=1.0, seed=seed)
        texts[name] = [row["ids"] for row in rows_of(tmp_path / f"{name}.jsonl")]
    assert texts["a"] == texts["b"] != texts["c"]


def test_in_process_goes_on_after_an_interruption(target, tmp_path, monkeypatch):
    from dflash_ext.data import in_process as module

    folder, *_ = target
    monkeypatch.setattr(module, "_BATCHES_OF_A_CHUNK", 1)
    source = various(tmp_path)
    in_process(source, tmp_path / "whole.jsonl", folder, temperature=1.0)
    calls = []
    plain = module.answer

    def interrupted(*args, **options):
        calls.append(len(args[1]))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return plain(*args, **options)

    monkeypatch.setattr(module, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        in_process(source, tmp_path / "o.jsonl", folder, temperature=1.0)
    in_process(source, tmp_path / "o.jsonl", folder, temperature=1.0)
    assert calls == [4, 4, 4, 4, 4, 4, 1]  # six chunks, of which one was interrupted
    assert (tmp_path / "o.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_store_is_answered_in_process_and_refused_by_an_endpoint(target, tmp_path):
    folder, model, tokenizer = target
    with StoreWriter(tmp_path / "s") as writer:
        for text in ("w1", "w2 w3"):
            prompt = prompt_ids(tokenizer, [user(text)])
            writer.append([*prompt, 40, 41], [False] * len(prompt) + [True, True])
        writer.append([30, 31], [True, True])
    report = in_process(tmp_path / "s", tmp_path / "o.jsonl", folder)
    assert report.skipped == {"sample has no prompt": 1}
    for row, text in zip(rows_of(tmp_path / "o.jsonl"), ("w1", "w2 w3"), strict=True):
        prompt = prompt_ids(tokenizer, [user(text)])
        assert row["ids"] == prompt + naive_answer(model, prompt, tokenizer.eos_token_id)
    with FakeEndpoint() as server, pytest.raises(UserError, match="token store holds ids"):
        run(tmp_path / "s", tmp_path / "e.jsonl", endpoint=server.url)


def test_in_process_prompts_that_do_not_fit_are_reasons(target, tmp_path):
    folder, *_ = target
    rows = [[user("w1")], [user(" ".join(["w2"] * 600))]]  # the target has 512 positions
    report = in_process(write(tmp_path / "p.jsonl", rows), tmp_path / "o.jsonl", folder)
    assert report.skipped == {"no answer could be had": 1}
    assert "512 positions" in report.examples["no answer could be had"]


def test_thinking_turns_become_samples_of_their_own(tmp_path):
    from dflash_ext.data.in_process import samples_of

    tokenizer = make_tokenizer(THINKING)
    first = prompt_ids(tokenizer, [user("a")])
    thought = tokenizer("<think>\nhm\n</think>\n\nb<|im_end|>").input_ids
    said = assistant("<think>\nhm\n</think>\n\nb")
    second = prompt_ids(tokenizer, [user("a"), said, user("c")])  # without the earlier thought
    samples = samples_of([(first, thought), (second, thought)])
    assert samples == [
        (first + thought, [0] * len(first) + [1] * len(thought)),
        (second + thought, [0] * len(second) + [1] * len(thought)),
    ]


# A real server ---------------------------------------------------------------------------------


def test_transformers_serve_gives_what_the_target_gives_in_process(target, tmp_path):
    import socket

    folder, _, tokenizer = target
    source = various(tmp_path, 8)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = open(tmp_path / "serve.log", "w")  # noqa: SIM115
    server = subprocess.Popen(
        ["transformers", "serve", str(folder), "--host", "127.0.0.1", "--port", str(port)]
        + ["--device", "cpu", "--dtype", "float32"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=log,
        stderr=log,
    )
    try:
        endpoint = f"http://127.0.0.1:{port}/v1"
        options = {"endpoint": endpoint, "model": str(folder), "concurrency": 3}
        deadline = time.monotonic() + 120
        # It takes a while to start: running again asks for what is missing.
        while True:
            try:
                report = run(source, tmp_path / "o.jsonl", **options)
            except UserError:
                report = None
            if report is not None and not report.skipped:
                break
            assert time.monotonic() < deadline, (tmp_path / "serve.log").read_text()
            assert server.poll() is None, (tmp_path / "serve.log").read_text()
    finally:
        server.terminate()
        server.wait(30)
        log.close()
    assert report.answered == 8
    in_process(source, tmp_path / "own.jsonl", folder)
    for row, own in zip(
        rows_of(tmp_path / "o.jsonl"), rows_of(tmp_path / "own.jsonl"), strict=True
    ):
        answer = [i for i, m in zip(own["ids"], own["mask"]) if m]
        text = tokenizer.decode(answer, skip_special_tokens=True)
        assert row["messages"][-1]["content"].split() == text.split()
        finished = answer[-1] == tokenizer.eos_token_id
        assert row["messages"][-1].get("unfinished", False) == (not finished)
