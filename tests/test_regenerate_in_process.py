"""The target's own answers in this process, against plain decoding and a real server."""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import time
from importlib.metadata import entry_points

import pytest
import torch
from busy_machine import PATIENCE_SECONDS, free_port
from data_fixtures import THINKING, make_tokenizer, make_word_tokenizer, tiny_model
from fake_endpoint import FakeEndpoint
from regenerate_cases import (  # noqa: F401
    assistant,
    rows_of,
    run,
    short_pauses,
    user,
    write,
)

from dflash_ext.data.encode import encode_row
from dflash_ext.data.rows import ChatOptions
from dflash_ext.data.store import StoreWriter
from dflash_ext.errors import UserError
from dflash_ext.target import Target


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """(folder, model, tokenizer) of a random target whose turns end now and then."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = make_word_tokenizer()
    model = tiny_model(tokenizer, end_bias=5.8)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, model, tokenizer


@pytest.fixture(autouse=True, scope="module")
def _loaded_once():
    """Answering changes nothing of a target, so all tests share the loaded one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "load", functools.cache(Target.load))
        yield


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


def transformers_command(arguments, log):
    """`transformers ARGUMENTS`, offline; all it says goes to `log`."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.argv = ["transformers", *arguments]
    (command,) = entry_points(group="console_scripts", name="transformers")
    command.load()()


def test_transformers_serve_gives_what_the_target_gives_in_process(target, tmp_path):
    folder, _, tokenizer = target
    source = various(tmp_path, 8)
    port = free_port()
    # Its own command, in a process that has imported most of it already.
    server = multiprocessing.get_context("forkserver").Process(
        target=transformers_command,
        args=(
            ["serve", str(folder), "--host", "127.0.0.1", "--port", str(port)]
            + ["--device", "cpu", "--dtype", "float32"],
            tmp_path / "serve.log",
        ),
    )
    server.start()
    try:
        endpoint = f"http://127.0.0.1:{port}/v1"
        options = {"endpoint": endpoint, "model": str(folder), "concurrency": 3}
        deadline = time.monotonic() + PATIENCE_SECONDS
        # It takes a while to start: running again asks for what is missing.
        while True:
            try:
                report = run(source, tmp_path / "o.jsonl", **options)
            except UserError:
                report = None
            if report is not None and not report.skipped:
                break
            assert time.monotonic() < deadline, (tmp_path / "serve.log").read_text()
            assert server.is_alive(), (tmp_path / "serve.log").read_text()
    finally:
        server.kill()
        server.join()
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
