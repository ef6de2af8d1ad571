"""Real chat templates, each with a tiny tokenizer that knows its special tokens."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "chat_templates"


@dataclass(frozen=True)
class Family:
    """A template and what its model writes around a plain answer."""

    template: str
    special: tuple[str, ...]
    end: str
    """The end-of-turn token."""
    eos: str
    bos: str | None = None
    plain: tuple[str, ...] = ()
    """Added tokens that are not special."""
    swallow: bool = False
    """Special tokens take the white space behind them along (as Phi's do)."""
    boilerplate: str = ""
    """What stands between the prompt and any answer without being the model's."""
    fans_out: bool = False
    system: bool = True
    arguments: str = "{}"

    def tokenizer(self) -> Any:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(_backend(self)),
            eos_token=self.eos,
            bos_token=self.bos,
        )
        tokenizer.chat_template = (FOLDER / f"{self.template}.jinja").read_text()
        return tokenizer


_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_INST = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]")
_INST += ("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]")
_INST += ("[/SYSTEM_PROMPT]", "[ARGS]", "[CALL_ID]", "[TOOL_CONTENT]")
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
_DEEPSEEK += ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>")
_DEEPSEEK += ("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>")
_EOS = "<｜end▁of▁sentence｜>"
_EMPTY = "<think>\n\n</think>\n\n"
_QWEN3 = Family(
    "qwen3", _IM, "<|im_end|>", "<|im_end|>", plain=_THINK, boilerplate=_EMPTY, fans_out=True
)
_QWEN35 = Family(
    "qwen3.5",
    _IM,
    "<|im_end|>",
    "<|im_end|>",
    plain=_THINK,
    boilerplate="\n</think>\n\n",  # its prompt has opened the block
    fans_out=True,
)
_OFF = '{"enable_thinking": false}'

FAMILIES = {
    "chatml": Family("chatml", _IM, "<|im_end|>", "<|im_end|>"),
    "smollm2": Family("smollm2", _IM, "<|im_end|>", "<|im_end|>"),
    "zephyr": Family("zephyr", ("<s>", "</s>"), "</s>", "</s>"),
    "llama3": Family("llama3", _LLAMA, "<|eot_id|>", "<|eot_id|>", "<|begin_of_text|>"),
    "gemma": Family(
        "gemma",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
        "<eos>",
        "<bos>",
        system=False,
    ),
    "phi_3.5": Family(
        "phi_3.5",
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "<|end|>",
        "<|endoftext|>",
        swallow=True,
    ),
    # With a system message its prompts say it where its full text does not: refused.
    "mistral_nemo": Family("mistral_nemo", _INST, "</s>", "</s>", "<s>", system=False),
    "mistral_small_3.2": Family("mistral_small_3.2", _INST, "</s>", "</s>", "<s>"),
    "qwen2.5": Family("qwen2.5", _IM, "<|im_end|>", "<|im_end|>", plain=_THINK),
    "qwen3": _QWEN3,
    # Its prompt holds the empty block already.
    "qwen3_no_thinking": Family(
        "qwen3", _IM, "<|im_end|>", "<|im_end|>", plain=_THINK, fans_out=True, arguments=_OFF
    ),
    "qwen3.5": _QWEN35,
    "qwen3.5_no_thinking": Family(
        "qwen3.5", _IM, "<|im_end|>", "<|im_end|>", plain=_THINK, fans_out=True, arguments=_OFF
    ),
    "qwq_no_thinking": Family(
        "qwq", _IM, "<|im_end|>", "<|im_end|>", plain=_THINK, fans_out=True, arguments=_OFF
    ),
    "gpt_oss": Family(
        "gpt_oss",
        _HARMONY,
        "<|return|>",
        "<|return|>",
        boilerplate="<|channel|>final<|message|>",
        fans_out=True,
    ),
    "deepseek_v3.1": Family(
        "deepseek_v3.1", _DEEPSEEK, _EOS, _EOS, "<｜begin▁of▁sentence｜>", plain=_THINK
    ),
}
# Their prompts open a think block: an answer without reasoning is none of theirs.
THINKERS = {
    "deepseek_r1": Family(
        "deepseek_r1", _DEEPSEEK, _EOS, _EOS, "<｜begin▁of▁sentence｜>", plain=_THINK
    ),
    "qwq": Family(
        "qwq", _IM, "<|im_end|>", "<|im_end|>", plain=_THINK, arguments='{"enable_thinking": true}'
    ),
}


@functools.cache
def _trained() -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = ["The quick brown fox jumps over the lazy dog.", "user assistant system\n\nHello there!"]
    backend.train_from_iterator(text * 20, trainer)
    return str(backend.to_str())


@functools.cache
def _backend(family: Family) -> str:
    backend = Tokenizer.from_str(_trained())
    backend.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False, rstrip=family.swallow)
            for t in family.special
        ]
    )
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in family.plain])
    return json.dumps(json.loads(backend.to_str()))
