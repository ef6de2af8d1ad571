"""What differs between transformers releases is answered in one file, by what is there."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from tiny_targets import FAMILIES, one_thread, tiny_hybrid, tiny_model, tiny_tokenizer  # noqa: F401

import dflash_ext
from dflash_ext import transformers_api as api
from dflash_ext.errors import UserError

PACKAGE = Path(dflash_ext.__file__).parent
SOURCES = [p for p in sorted(PACKAGE.rglob("*.py")) if p.name != "transformers_api.py"]
# Rules of our own, each asked for the fields it reads.
OWN_SIGNATURES = {"drafter_rules.py"}
# Words under which releases differ, as strings, keywords or attributes.
WORDS = {"past_key_values", "logits_to_keep", "_attn_implementation"}
ASKED_FOR = WORDS | {"batch_repeat_interleave", "batch_select_indices", "num_local_experts"}
LIBRARIES = {"torch", "transformers", "tokenizers", "huggingface_hub"}


REALLY_RUNS = api.multiplies_in_groups(torch.device("cpu"), torch.float32)


def dotted(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, (ast.Attribute, ast.Name)) else ""


def depends_on_a_release(source: str, signatures: bool = False) -> list[str]:
    """Places of a module that look into a library or compare its version."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            inside = [n for n in ast.walk(node) if isinstance(n, ast.Attribute)]
            if any(n.attr in ("__version__", "version") for n in inside):
                found.append(f"{node.lineno}: compares versions")
        elif isinstance(node, ast.ImportFrom) and node.module:
            library, *inner = node.module.split(".")
            private = any(a.name.startswith("_") for a in node.names)
            if library == "packaging" or (library == "transformers" and (inner or private)):
                found.append(f"{node.lineno}: imports from {node.module}")
        elif isinstance(node, ast.Import):
            if any(a.name.startswith(("packaging", "transformers.")) for a in node.names):
                found.append(f"{node.lineno}: imports {ast.unparse(node)}")
        elif isinstance(node, ast.Call) and node.args:
            name, first = dotted(node.func), dotted(node.args[0])
            if name in ("inspect.signature", "signature") and not signatures:
                found.append(f"{node.lineno}: asks for a signature")
            elif name in ("hasattr", "getattr") and first.split(".")[0] in LIBRARIES:
                found.append(f"{node.lineno}: {name} of {first}")
        elif isinstance(node, ast.Attribute) and node.attr in WORDS:
            found.append(f"{node.lineno}: .{node.attr}")
        elif isinstance(node, (ast.Constant, ast.keyword)):
            word = node.value if isinstance(node, ast.Constant) else node.arg
            if isinstance(word, str) and word in ASKED_FOR:
                found.append(f"{node.lineno}: {word!r}")
    return found


def test_releases_are_told_apart_in_one_file():
    found = {
        path.name: depends_on_a_release(path.read_text(), path.name in OWN_SIGNATURES)
        for path in SOURCES
    }
    assert not {name: places for name, places in found.items() if places}


@pytest.mark.parametrize(
    "line",
    [
        "if transformers.__version__ >= '5.8': pass",
        "old = Version(importlib.metadata.version('torch')) < Version('2.9')",
        "from packaging.version import Version",
        "from transformers.cache_utils import DynamicLayer",
        "import transformers.utils.hub",
        "known = inspect.signature(model.forward).parameters",
        "if hasattr(torch.optim, 'Muon'): pass",
        "kind = config._attn_implementation",
        "model(ids, past_key_values=cache)",
        "keywords['logits_to_keep'] = 1",
    ],
)
def test_and_a_breach_of_that_is_seen(line):
    assert depends_on_a_release(line)


def model_of(forward) -> SimpleNamespace:
    return SimpleNamespace(forward=forward)


def test_the_cache_s_keyword_is_the_forward_s_own():
    assert api.cache_argument(model_of(lambda input_ids, cache=None: 0)) == "cache"
    assert api.cache_argument(model_of(lambda ids, past_key_values=None: 0)) == "past_key_values"
    # A forward that only takes keywords: what the older releases call it.
    assert api.cache_argument(model_of(lambda **keywords: 0)) == "past_key_values"


def test_logits_are_cut_where_the_forward_can():
    assert api.last_logits_only(model_of(lambda ids, logits_to_keep=0: 0)) == {"logits_to_keep": 1}
    assert api.last_logits_only(model_of(lambda ids: 0)) == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_keywords_reach_the_installed_models(family):
    """A cache given under the keyword is filled, and the last logits are those of all."""
    model, ids, cache = tiny_model(family), torch.arange(5)[None], tf.DynamicCache()
    with torch.no_grad():
        every = model(input_ids=ids).logits
        last = model(
            input_ids=ids, **{api.cache_argument(model): cache}, **api.last_logits_only(model)
        ).logits
    assert last.shape[1] == 1
    torch.testing.assert_close(last, every[:, -1:])
    for layer in cache.layers:
        pair = api.keys_and_values(layer)
        assert pair is not None
        assert all(x.shape == (1, 2, 5, 16) for x in pair)
    assert api.can_repeat_rows(cache)
    assert api.can_drop_rows(cache)


def test_what_a_cache_s_layers_can_do_is_asked_of_each():
    able = SimpleNamespace(batch_repeat_interleave=1, batch_select_indices=1)
    for layers, can in (([able, able], True), ([able, SimpleNamespace()], False)):
        cache = SimpleNamespace(layers=layers)
        assert (api.can_repeat_rows(cache), api.can_drop_rows(cache)) == (can, can)
    assert api.keys_and_values(SimpleNamespace(keys=None, values=None)) is None
    assert api.keys_and_values(SimpleNamespace()) is None


def test_layer_types_with_and_without_a_list():
    def kinds(**values):
        config = SimpleNamespace(num_hidden_layers=2, **values)
        return api.layer_types(config), api.sliding_window(config)

    full, sliding = "full_attention", "sliding_attention"
    assert kinds() == ((full, full), None)
    assert kinds(sliding_window=7) == ((sliding, sliding), 7)  # Mistral
    assert kinds(sliding_window=7, layer_types=None) == ((sliding, sliding), 7)
    assert kinds(sliding_window=7, use_sliding_window=False) == ((full, full), None)  # Qwen2
    assert kinds(sliding_window=7, layer_types=[sliding, full]) == ((sliding, full), 7)
    assert api.layer_types(tiny_model("gemma3").config) == (sliding, full, sliding, full)
    assert api.layer_types(tiny_model("mistral").config) == (sliding,) * 4
    assert api.layer_types(tiny_model("qwen2").config) == (full,) * 4
    assert api.layer_types(tiny_hybrid().config) == ("linear_attention",) * 3 + (full,)


def test_the_rope_base_wherever_a_config_keeps_it():
    for values, base in (
        ({"rope_parameters": {"rope_theta": 5e5}}, 5e5),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {}}},
            1e6,
        ),
        ({"rope_parameters": None, "rope_theta": 1e4}, 1e4),
        ({"rope_theta": 10000}, 1e4),
        ({}, None),
    ):
        assert api.rope_theta(SimpleNamespace(**values)) == base
    model = tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 2e4})
    assert api.rope_theta(model.config) == 2e4


def test_widths_and_experts():
    plain = SimpleNamespace(hidden_size=64, num_attention_heads=4)
    assert (api.head_dim(plain), api.active_experts(plain)) == (16, 1.0)
    mixture = {"num_experts_per_tok": 2, "head_dim": 32}
    for name in ("num_experts", "num_local_experts"):
        config = SimpleNamespace(**{name: 8}, **mixture)
        assert (api.head_dim(config), api.active_experts(config)) == (32, 0.25)
    assert api.active_experts(tiny_model("qwen3_moe").config) == 0.5


@pytest.mark.parametrize("runs", [True, False])
def test_experts_are_multiplied_in_a_way_that_runs(monkeypatch, runs):
    monkeypatch.setattr(api, "multiplies_in_groups", lambda *_: runs)
    model, ids = tiny_model("qwen3_moe"), torch.arange(5)[None]
    assert model.config._experts_implementation == ("grouped_mm" if runs else "eager")
    expected = tiny_model("qwen3_moe", experts_implementation="eager")(ids).logits
    if runs and not REALLY_RUNS:
        return
    torch.testing.assert_close(model(ids).logits, expected)
    plain = tiny_model("llama")
    before = plain.config.to_dict()
    api.choose_experts(plain)
    assert plain.config.to_dict() == before


def test_a_model_is_described_without_its_place_and_its_release():
    config = tiny_model().config
    described = api.model_description(config)
    assert described["hidden_size"] == 64
    config._name_or_path, config.transformers_version = "elsewhere", "0.1"
    assert api.model_description(config) == described


def test_progress_bars_and_warnings_come_back(capfd):
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled(), logging.get_verbosity()
    for warnings in (True, False):
        with api.quiet(warnings=warnings):
            assert not logging.is_progress_bar_enabled()
            assert (logging.get_verbosity() == before[1]) == warnings
        assert (logging.is_progress_bar_enabled(), logging.get_verbosity()) == before


def test_a_folder_without_a_config_or_tokenizer(tmp_path):
    with pytest.raises(UserError, match=r"has no readable config\.json") as error:
        api.read_config(str(tmp_path))
    assert "\n" not in str(error.value)
    assert api.read_tokenizer(str(tmp_path)) is None
    tiny_model().config.save_pretrained(tmp_path)
    assert api.read_tokenizer(str(tmp_path)) is None  # though its model type has a class for it
    tiny_tokenizer().save_pretrained(tmp_path)
    assert api.read_tokenizer(str(tmp_path)).eos_token == "</s>"
    assert api.read_config(str(tmp_path)).hidden_size == 64


def test_templates_compile_as_theirs_do():
    compile_template = api.template_compiler()
    assert compile_template is not None
    source = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = source
    theirs = tokenizer.apply_chat_template(messages, tokenize=False)
    assert compile_template(source).render(messages=messages) == theirs == "[a][b]"
