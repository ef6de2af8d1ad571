"""The evaluate command end to end on a tiny target, and what it shares with training."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from test_generate import drafter_for
from tiny_targets import one_thread, tiny_hybrid, tiny_model, tiny_tokenizer  # noqa: F401

from dflash_ext.bench.evaluation_table import evaluation_table
from dflash_ext.comparison import Comparison, DecodeOptions, encode_prompt, short_names
from dflash_ext.errors import UserError
from dflash_ext.evaluate import Options, evaluate, find_export, trained_target, trees_of
from dflash_ext.export import save_export
from dflash_ext.generate import plain_decode
from dflash_ext.sampling import Sampling
from dflash_ext.target import Target

PROMPTS = [[{"role": "user", "content": f"w{i} w{i + 1} w{i + 2}"}] for i in range(3)]


@pytest.fixture(scope="module")
def target() -> Target:
    model = tiny_model(num_hidden_layers=2)
    # The tokenizer knows 88 of 96 words; ids it cannot spell are fine, nothing is decoded to text.
    return Target(model, tiny_tokenizer(), path="tiny")


def test_prompts_go_through_the_chat_template(target):
    ids = encode_prompt(target, [{"role": "user", "content": "w5 w6"}])
    words = target.tokenizer.convert_ids_to_tokens(ids)
    assert words[1:4] == ["w5", "w6", "</s>"]
    assert len(words) == 5  # user w5 w6 </s> assistant: no bos added a second time
    bare = Target(tiny_model(), tiny_tokenizer(chat_template=False), path="some/where")
    with pytest.raises(UserError, match=r"some/where.*no chat template"):
        encode_prompt(bare, PROMPTS[0])


@pytest.fixture
def run(target, tmp_path) -> Path:
    """A run folder whose resolved.json names the target's files."""
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    folder = tmp_path / "run"
    save_export(drafter_for(target, block_size=4), folder / "export", target=target)
    (folder / "resolved.json").write_text(json.dumps({"target": str(tmp_path / "target")}))
    (tmp_path / "mine.txt").write_text("w3 w4\nw5 w6 w7\n")
    return folder


def test_the_command(run, tmp_path):
    console = Console(record=True, width=160, file=(tmp_path / "out").open("w"))
    out = tmp_path / "missing" / "folder" / "out.json"
    prompts = str(tmp_path / "mine.txt")
    options = Options(
        run,
        prompts=(prompts,),
        trees=(12, 5),
        max_new_tokens=12,
        batch=2,
        json=out,
        png=tmp_path / "out.png",
        device="cpu",
    )
    (report,) = evaluate(options, console)
    assert list(report.methods) == ["plain", "lookup", "chain", "tree@5", "tree@12"]
    for name, method in report.methods.items():
        assert method.identical == method.prompts == 2
        assert method.tokens == report.methods["plain"].tokens
        assert 1 <= method.accept_len <= 4
        assert (method.calibration is None) == (name in ("plain", "lookup"))
        assert len(method.slot_acceptance) == (0 if name == "plain" else 3)
    assert len(report.methods["chain"].recall[16]) == 3
    written = json.loads(out.read_text())
    assert written["dtype"] == "fp32"
    assert set(written["environment"]) >= {"date", "commit", "torch"}
    for name, method in report.methods.items():
        assert written["sets"][0][name]["accept_len"] == method.accept_len
        assert written["sets"][0][name]["tokens_per_second"] > 0
    lengths = [f"{report.methods[m].accept_len:.2f}" for m in ("lookup", "chain", "tree@5")]
    assert f"| mine.txt | {' | '.join(lengths)} |" in evaluation_table(written)
    assert " | 2/2 | " in evaluation_table(written)
    text = console.export_text()
    for shown in (
        "mine.txt",
        "2/2",
        "@12",
        "recall@4",
        f"{report.methods['chain'].accept_len:.2f}",
    ):
        assert shown in text
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    # The answer really is the target's: decoded again from the files, without any of the above.
    again = Target.load(tmp_path / "target")
    ids = encode_prompt(again, [{"role": "user", "content": "w3 w4"}])
    tokens = plain_decode(again, ids, 12, again.stop_ids).tokens
    sequence = again.model.generate(
        torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    assert sequence[0, len(ids) :].tolist() == tokens


def test_the_command_sampled(run, tmp_path):
    """Every way gives plain sampling's text; another seed another text."""
    prompts, tokens = (str(tmp_path / "mine.txt"),), []
    for seed in (1, 2):
        options = Options(run, prompts=prompts, trees=(6,), max_new_tokens=9, temperature=1.0)
        options = dataclasses.replace(options, top_p=0.9, seed=seed, limit=1, device="cpu")
        (report,) = evaluate(options, Console(file=(tmp_path / "out").open("w")))
        assert all(m.identical == 1 for m in report.methods.values())
        assert report.methods["chain"].calibration is None  # its guesses are draws
        tokens.append(report.methods["plain"].tokens)
    assert tokens == [9, 9]


def test_trees_are_chosen_for_the_target(target):
    hybrid, options = Target(tiny_hybrid()), Options(Path("x"))
    assert trees_of(options, target) == [16]
    assert trees_of(options, hybrid) == []
    assert trees_of(dataclasses.replace(options, trees=(9, 3, 9)), target) == [3, 9]
    with pytest.raises(UserError, match="chains, not trees"):
        trees_of(dataclasses.replace(options, trees=(3,)), hybrid)


def test_generations_are_kept_and_found_again(target, tmp_path):
    prompts = {"three": [encode_prompt(target, messages) for messages in PROMPTS]}
    drafter, calls = drafter_for(target, block_size=4), []
    options = DecodeOptions(20, batch=2)

    def progress(done, total):
        calls.append((done, total))

    first = Comparison(prompts, options, tmp_path)
    first.baselines(target, 4, progress)
    first.drafter("after", target, drafter, progress, record=True)
    assert calls == [(i, 3) for i in range(1, 4)] * 3
    assert first.report("after", "three", 4).identical == 3
    assert first.report("plain", "three", 4).accept_len == 1.0
    assert first.rows(4)[0]["before"] == "–"
    lengths = [n for g in first.results["after"]["three"] for n in g.accepted]
    assert first.accept_len("after") == sum(lengths) / len(lengths)

    again = Comparison(prompts, DecodeOptions(20, batch=1), tmp_path)  # batch changes nothing
    assert again.results == first.results
    again.baselines(target, 4, lambda *_: pytest.fail("decoded again"))
    for other in (DecodeOptions(19), DecodeOptions(20, sampling=Sampling(1.0))):
        assert Comparison(prompts, other, tmp_path).results == {}
    assert Comparison({"three": prompts["three"][:2]}, options, tmp_path).results == {}
    assert short_names(["a/x.txt", "b/x.txt", "c/y.txt"])["c/y.txt"] == "y.txt"


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
    best = save_export(drafter_for(target, block_size=4), tmp_path / "run" / "best" / "export")
    assert trained_target(find_export(tmp_path / "run" / "best")) == "some/where"
    assert find_export(best) == best
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
        ({"png": tmp_path}, "cannot write"),
        ({"batch": 0}, "batch 0"),
        ({"trees": (4, 0)}, r"trees \(4, 0\)"),
        ({"temperature": -1.0}, "temperature -1.0"),
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
