"""Tiny tokenizers and models for the data tests, built in memory."""

from __future__ import annotations

import functools
import hashlib
import zipfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|begin|>{% for m in messages %}<|header|>{{ m['role'] }}<|/header|>\n\n"
    "{{ m['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }}[/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] | trim }}</s>"
    "{% else %}{{ raise_exception('only user and assistant roles') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "<bos>{% for m in messages %}"
    "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "<start_of_turn>{{ role }}\n{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Like Qwen3: thinking is split off the text, kept in the last answer only; an answer without
# thinking gets an empty block when it is the last one.
THINKING = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% set text = m['content'] %}{% set think = m.get('reasoning_content') or '' %}"
    "{% if '</think>' in text %}"
    "{% set think = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>assistant\n"
    "{% if loop.last %}<think>\n{{ think }}\n</think>\n\n{% endif %}{{ text }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like Qwen3.5: the generation prompt has opened the think block already.
OPEN_THINKING = THINKING.replace(
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
)
# family -> template, the end-of-turn token an answer must be supervised up to
FAMILIES = {
    "chatml": (CHATML, "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot|>"),
    "mistral": (MISTRAL, "</s>"),
    "gemma": (GEMMA, "<end_of_turn>"),
    "thinking": (THINKING, "<|im_end|>"),
    "open_thinking": (OPEN_THINKING, "<|im_end|>"),
}
_SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|header|>", "<|/header|>"]
_SPECIAL += ["<|eot|>", "<s>", "</s>", "[INST]", "[/INST]", "<bos>", "<start_of_turn>"]
_SPECIAL += ["<end_of_turn>"]
_TEXT = ["The quick brown fox jumps over the lazy dog.", "user\n", "assistant\n\n", "Hello there!"]


@functools.cache
def _byte_level() -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_TEXT * 20, trainer)
    # As in Qwen3's tokenizer: one token each, but not "special".
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>")])
    return str(backend.to_str())


def make_tokenizer(template: str | None, eos: str = "<|im_end|>") -> Any:
    """A byte-level BPE tokenizer of about 400 tokens that knows the special tokens above."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_byte_level()), eos_token=eos, pad_token="<pad>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": _SPECIAL})
    tokenizer.chat_template = template
    return tokenizer


def make_word_tokenizer(words: int = 40) -> Any:
    """One token per word: whatever a random model writes is text that tokenises to itself."""
    vocabulary = [*_SPECIAL, "[UNK]", "user", "assistant", *(f"w{i}" for i in range(words))]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary)}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(_SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<pad>", unk_token="[UNK]"
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def tiny_model(
    tokenizer: Any, kind: type[Any] = LlamaForCausalLM, *, end_bias: float = 0.0, **overrides: Any
) -> Any:
    """A random model of 2 layers, hidden 32, grouped queries, whose turns end at `end_bias`.

    Without a bias a random model hardly ever ends a turn. A constant in the embedding's first
    dimension, which no layer writes to, survives to the head. There only special tokens' rows
    look at it: the end token's with `end_bias`, all others' so that they are never written.
    """
    torch.manual_seed(0)
    config = kind.config_class(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **overrides,
    )
    model = kind(config).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 3.0
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight[0] = 0.0
        head = model.get_output_embeddings().weight
        head *= 0.5  # flatter, so that prompts differ
        head[:, 0] = 0.0
        head[list(tokenizer.added_tokens_decoder), 0] = -20.0
        head[tokenizer.eos_token_id, 0] = end_bias
    return model


def make_wheel(folder: Path, name: str, version: str, files: dict[str, bytes]) -> tuple[Path, str]:
    """(path, sha256) of a minimal wheel holding `files`."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    path = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in files.items():
            archive.writestr(member, data)
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        archive.writestr(f"{info}/METADATA", metadata)
        wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", wheel)
        archive.writestr(f"{info}/RECORD", "")
    return path, hashlib.sha256(path.read_bytes()).hexdigest()
