"""Counting of accepted lengths, and the evaluate command end to end on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from test_generate import drafter_for
from tiny_targets import one_thread, tiny_model, tiny_tokenizer  # noqa: F401

from dflash_ext.errors import UserError
from dflash_ext.evaluate import (
    Options,
    encode_prompt,
    evaluate,
    evaluate_prompts,
    find_export,
    summarise,
    trained_target,
)
from dflash_ext.export import save_export
from dflash_ext.generate import Generation, plain_decode
from dflash_ext.target import Target

PROMPTS = [[{"role": "user", "content": f"w{i} w{i + 1} w{i + 2}"}] for i in range(3)]


@pytest.fixture(scope="module")
def target() -> Target:
    model = tiny_model(num_hidden_layers=2)
    # The tokenizer knows 88 of 96 words; ids it cannot spell are fine, nothing is decoded to text.
    return Target(model, tiny_tokenizer(), path="tiny")


def generation(tokens, accepted, stopped=False) -> Generation:
    return Generation(tokens, accepted, 0.5, stopped)


def test_counts():
    runs = [generation(list(range(12)), [4, 1, 2, 4]), generation([1, 2, 3], [2], stopped=True)]
    reference = [generation(list(range(12)), []), generation([1, 2, 4], [])]
    report = summarise(runs, 4, reference)
    assert (report.prompts, report.tokens, report.steps, report.seconds) == (2, 15, 5, 1.0)
    assert report.accept_len == (4 + 1 + 2 + 4 + 2) / 5
    assert report.full_block_rate == 2 / 5
    # Slot 1: reached by all 5 steps, failed by the second. Slot 2: reached by four of them, but
    # the one cut by its stop token says nothing, and the third failed. Slot 3: passed twice.
    assert report.slot_acceptance == [4 / 5, 2 / 3, 1.0]
    assert report.identical_to_greedy == 1
    assert report.tokens_per_second == 15.0


def test_counts_of_nothing():
    report = summarise([generation([7], [])], 4)
    assert (report.accept_len, report.steps, report.full_block_rate) == (1.0, 0, 0.0)
    assert report.slot_acceptance == [None, None, None]
    assert report.identical_to_greedy is None
    assert summarise([], 4).tokens_per_second == 0.0


def test_prompts_go_through_the_chat_template(target):
    ids = encode_prompt(target, [{"role": "user", "content": "w5 w6"}])
    words = target.tokenizer.convert_ids_to_tokens(ids)
    assert words[1:4] == ["w5", "w6", "</s>"]
    assert len(words) == 5  # user w5 w6 </s> assistant: no bos added a second time
    bare = Target(tiny_model(), tiny_tokenizer(chat_template=False), path="some/where")
    with pytest.raises(UserError, match=r"some/where.*no chat template"):
        encode_prompt(bare, PROMPTS[0])


def test_a_set_beside_its_baselines(target):
    drafter, calls = drafter_for(target, block_size=4), []
    report = evaluate_prompts(
        target,
        drafter,
        [encode_prompt(target, messages) for messages in PROMPTS],
        max_new_tokens=20,
        name="three",
        progress=lambda done, total: calls.append((done, total)),
    )
    assert report.drafter.identical_to_greedy == report.lookup.identical_to_greedy == 3
    assert report.greedy.steps == report.greedy.tokens - 3
    assert report.drafter.accept_len >= 1.0
    assert report.drafter.tokens == report.greedy.tokens <= 60
    assert len(report.drafter.slot_acceptance) == len(report.lookup.slot_acceptance) == 3
    assert calls == [(i, 9) for i in range(1, 10)]


def test_the_command(target, tmp_path):
    model_dir, run = tmp_path / "target", tmp_path / "run"
    target.model.save_pretrained(model_dir)
    target.tokenizer.save_pretrained(model_dir)
    drafter = drafter_for(target, block_size=4)
    save_export(drafter, run / "export", target=target)
    prompts = tmp_path / "mine.txt"
    prompts.write_text("w3 w4\nw5 w6 w7\n")
    console = Console(record=True, width=120, file=(tmp_path / "out").open("w"))
    out = tmp_path / "missing" / "folder" / "out.json"
    (run / "resolved.json").write_text(json.dumps({"target": str(model_dir)}))
    options = Options(
        run,
        prompts=(str(prompts),),
        max_new_tokens=12,
        json=out,
        device="cpu",
    )
    (report,) = evaluate(options, console)
    assert report.drafter.identical_to_greedy == 2
    written = json.loads(out.read_text())
    assert written["dtype"] == "fp32"
    assert set(written["environment"]) >= {"date", "commit", "torch"}
    assert written["sets"][0]["drafter"]["accept_len"] == report.drafter.accept_len
    assert written["sets"][0]["lookup"]["tokens_per_second"] > 0
    text = console.export_text()
    assert "mine.txt" in text
    assert "2/2" in text
    assert f"{report.drafter.accept_len:.2f}" in text
    # The answer really is the target's: decoded again from the files, without any of the above.
    again = Target.load(model_dir)
    ids = encode_prompt(again, [{"role": "user", "content": "w3 w4"}])
    tokens = plain_decode(again, ids, 12, again.stop_ids).tokens
    sequence = again.model.generate(
        torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    assert sequence[0, len(ids) :].tolist() == tokens


def test_find_export_and_errors(target, tmp_path):
    folder = save_export(drafter_for(target, block_size=4), tmp_path / "run" / "export")
    assert find_export(tmp_path / "run") == find_export(folder) == folder
    with pytest.raises(UserError, match="neither an export"):
        find_export(tmp_path)
    with pytest.raises(UserError, match="max_new_tokens 0"):
        evaluate(Options(folder, max_new_tokens=0), Console())


def test_the_target_is_found_from_a_run_and_from_its_export(target, tmp_path, monkeypatch):
    export = save_export(drafter_for(target, block_size=4), tmp_path / "run" / "export")
    resolved = tmp_path / "run" / "resolved.json"
    resolved.write_text(json.dumps({"target": "some/where"}))
    assert trained_target(find_export(tmp_path / "run")) == "some/where"
    assert trained_target(find_export(export)) == "some/where"
    monkeypatch.chdir(export)
    assert trained_target(find_export(Path("."))) == "some/where"
    for content in ("{", "[]", "{}"):
        resolved.write_text(content)
        with pytest.raises(UserError, match=r"resolved\.json does not name the target"):
            trained_target(export)
    resolved.unlink()
    monkeypatch.setattr("dflash_ext.evaluate.smollm2_dir", lambda: Path("quickstart"))
    assert trained_target(export) == "quickstart"


def test_a_prompt_the_template_refuses_is_named(target):
    messages = [{"role": "system", "content": "be w1"}, {"role": "user", "content": "say w2"}]
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
    )
    refusing = Target(tiny_model(), tokenizer, path="some/gemma")
    with pytest.raises(UserError, match=r"'say w2'.*system, user.*System role not supp.*gemma"):
        encode_prompt(refusing, messages)


def test_mistakes_fail_before_any_work(target, tmp_path, monkeypatch):
    """Each stops at its own check: neither an export nor a target is there to be loaded."""
    (tmp_path / "file").write_text("")
    for changes, message in (
        ({"device": "gpu"}, "device 'gpu' is unknown"),
        ({"device": "meta"}, "device 'meta' is not supported"),
        ({"json": tmp_path}, "cannot write"),
        ({"json": Path("/proc/self/out.json")}, "cannot write"),
    ):
        with pytest.raises(UserError, match=message):
            evaluate(Options(tmp_path / "none", **changes), Console())
    with pytest.raises(OSError, match="File exists"):  # one line by run_cli
        evaluate(Options(tmp_path / "none", json=tmp_path / "file" / "out.json"), Console())


def test_command_line_errors_are_one_line(tmp_path, capsys, monkeypatch):
    from dflash_ext import evaluate as module
    from dflash_ext.errors import run_cli

    monkeypatch.setattr("sys.argv", ["evaluate", str(tmp_path / "none"), "--limit", "2"])
    with pytest.raises(SystemExit) as stop:
        run_cli(module.main)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
