"""Tiny random causal LMs of every supported family, and a word-level tokenizer for them."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

from dflash_ext.transformers_api import choose_experts

VOCAB = 96
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "sdpa",
}
WINDOW = 7  # short enough that every test text is longer
FAMILIES = {
    "llama": (tf.LlamaForCausalLM, tf.LlamaConfig, {}),
    "qwen2": (tf.Qwen2ForCausalLM, tf.Qwen2Config, {}),
    "qwen3": (tf.Qwen3ForCausalLM, tf.Qwen3Config, {"head_dim": 16, "tie_word_embeddings": False}),
    "qwen3_moe": (
        tf.Qwen3MoeForCausalLM,
        tf.Qwen3MoeConfig,
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "gemma3": (
        tf.Gemma3ForCausalLM,
        tf.Gemma3TextConfig,
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 16,
        },
    ),
    "mistral": (tf.MistralForCausalLM, tf.MistralConfig, {"sliding_window": WINDOW}),
}
# Also read, but not decoded by the tests: mixture of experts, biases, sinks, sliding layers.
GPT_OSS = {
    "head_dim": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
READ_FAMILIES = FAMILIES | {"gpt_oss": (tf.GptOssForCausalLM, tf.GptOssConfig, GPT_OSS)}


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny matrices gain nothing from threads and lose much where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_model(family: str = "llama", *, seed: int = 0, std: float = 0.2, **changes):
    """A random fp32 model, weights wide enough that hidden states and logits vary."""
    model_class, config_class, extra = READ_FAMILIES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**COMMON, **extra, **changes}))
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=std)
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)
    choose_experts(model)  # or a bare one would not run under every release
    return model.eval()


def tiny_hybrid(seed: int = 0):
    """A random fp32 model of three linear-attention layers and one of full attention."""
    extra = {"head_dim": 16, "tie_word_embeddings": False, "linear_conv_kernel_dim": 4}
    extra |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    extra |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    extra["layer_types"] = [*["linear_attention"] * 3, "full_attention"]
    torch.manual_seed(seed)
    model = tf.Qwen3_5ForCausalLM(tf.Qwen3_5TextConfig(**{**COMMON, **extra}))
    for name, parameter in model.named_parameters():
        if not any(part in name for part in ("norm", "A_log", "dt_bias")):
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def tiny_tokenizer(special: tuple[str, ...] = (), chat_template: bool = True):
    """One token per whitespace-separated word: <pad>, <s>, </s>, `special`, then w0, w1, …"""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<s>", "</s>", *special]
    words += [f"w{i}" for i in range(VOCAB - 8 - len(words))]  # 8 rows no token uses
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="w0"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = tf.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    if chat_template:
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} </s> {% endfor %}"
            "{% if add_generation_prompt %}assistant {% endif %}"
        )
    return tokenizer
