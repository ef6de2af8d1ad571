"""Loading a target: what comes out, and every way it fails is one line for the user."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from tiny_targets import VOCAB, one_thread, tiny_model, tiny_tokenizer  # noqa: F401

from dflash_ext.batch import PackedBatch
from dflash_ext.errors import UserError
from dflash_ext.target import Target


def test_load_from_a_directory(tmp_path, capfd):
    model = tiny_model("qwen2")
    model.save_pretrained(tmp_path)
    capfd.readouterr()
    bare = Target.load(tmp_path, dtype="fp32", tap_ids=(1,))
    assert capfd.readouterr().err == ""  # no second progress display
    with pytest.raises(UserError, match="has no tokenizer"):
        _ = bare.tokenizer
    tiny_tokenizer().save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), dtype=torch.bfloat16)
    assert target.dtype == torch.bfloat16
    assert target.tokenizer.eos_token == "</s>"
    assert target.stop_ids == {2}
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (4, 64, VOCAB)
    ids = torch.tensor([3, 5, 9, 4])
    batch = PackedBatch.from_documents([(ids, torch.ones(4, dtype=torch.bool))], [0])
    expected = Target(model, tap_ids=(1,)).features(batch).features
    assert torch.equal(bare.features(batch).features, expected)


def test_load_errors_are_one_line(tmp_path):
    with pytest.raises(UserError, match=r"has no readable config\.json") as error:
        Target.load(tmp_path)
    assert "\n" not in str(error.value)
    (tmp_path / "config.json").write_text(
        '{"model_type": "novel", "auto_map": {"AutoConfig": "evil.C", "AutoModel": "evil.M"}}'
    )
    (tmp_path / "evil.py").write_text("raise SystemExit('remote code ran')")
    with pytest.raises(UserError, match="trust_remote_code") as error:
        Target.load(tmp_path)
    assert "\n" not in str(error.value)


def test_weights_of_another_shape_are_a_user_error(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 32}))
    with pytest.raises(UserError, match="cannot be loaded") as error:
        Target.load(tmp_path)
    assert "\n" not in str(error.value)


def test_a_missing_package_is_a_user_error(tmp_path, monkeypatch):
    """Quantised checkpoints need one more."""
    tiny_model().config.save_pretrained(tmp_path)

    def load(*_args, **_keywords):
        raise ImportError("a GPTQ model requires optimum\n(`pip install optimum`)")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    with pytest.raises(UserError, match=r"cannot be loaded.* requires optimum \(`pip") as error:
        Target.load(tmp_path)
    assert "\n" not in str(error.value)


def test_damaged_files_are_user_errors(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="has no tokenizer"):
        _ = Target.load(tmp_path).tokenizer
    weights = (tmp_path / "model.safetensors").read_bytes()
    for content in (b"", weights[:-100], b"version https://git-lfs.github.com/spec/v1\n"):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(UserError, match="cannot be loaded") as error:
            Target.load(tmp_path)
        assert "\n" not in str(error.value)


def test_a_gpu_that_is_not_there_is_a_user_error(monkeypatch):
    for count, device in ((0, "cuda"), (0, "cuda:0"), (2, "cuda:7"), (2, torch.device("cuda", 2))):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        with pytest.raises(UserError, match=f"device '{device}' .* torch sees {count} GPUs"):
            Target.load("anywhere", device=device)
