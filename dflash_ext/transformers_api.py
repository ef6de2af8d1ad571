"""What differs between transformers releases, 5.6.0 and newer: here, and nowhere else.

Every answer comes from what an installed release has, never from its number: a release that renames
something again needs a line here at most. Names that transformers keeps to itself are used here
alone, each with a way to do without. What changed so far, as benchmarks/versions.py found it:

- 5.24 calls a forward's cache `cache`, until then `past_key_values`.
- 5.6 forgets a linear-attention layer's state when it reads several tokens at once;
  `reader.StateReader` finds out by trying and reads one by one then.
- 5.6 multiplies experts grouped on a CPU whose torch (2.8) cannot: `choose_experts`.
- Layers of a cache take a config (5.8) or keywords (5.17) where they took nothing.

transformers is imported where it is used: it is heavy, and whoever only parses options needs none.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from dflash_ext.drafter_rules import FULL, SLIDING
from dflash_ext.errors import UserError
from dflash_ext.torch_api import multiplies_in_groups

# Bases of their modules whose `__call__` adds nothing to torch's in inference.
PLAIN_CALLS = ("transformers.modeling_layers.GradientCheckpointingLayer",)
# What a config says of the release that wrote it and of where it lies, not of the model.
_NOT_THE_MODEL = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


# --- a model's forward and its cache


def _takes(model: Any, keyword: str) -> bool:
    return keyword in inspect.signature(model.forward).parameters


def cache_argument(model: Any) -> str:
    """Name under which a model's forward takes its cache."""
    return "cache" if _takes(model, "cache") else "past_key_values"


def last_logits_only(model: Any) -> dict[str, int]:
    """Keywords for logits of the last position alone; none if the model cannot do that."""
    return {"logits_to_keep": 1} if _takes(model, "logits_to_keep") else {}


def keys_and_values(layer: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """[R, Hkv, n, D] each of a cache's layer; None if it shares those of an earlier layer."""
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    return None if keys is None or values is None else (keys, values)


def can_repeat_rows(cache: Any) -> bool:
    """Has every layer `batch_repeat_interleave`? A recurrent state, for instance, may lack it."""
    return all(hasattr(layer, "batch_repeat_interleave") for layer in cache.layers)


def can_drop_rows(cache: Any) -> bool:
    """Has every layer `batch_select_indices`?"""
    return all(hasattr(layer, "batch_select_indices") for layer in cache.layers)


# --- what a config says


def layer_types(config: Any) -> tuple[str, ...]:
    """The kind of each decoder layer, by transformers' names; config: a text config."""
    if named := getattr(config, "layer_types", None):
        return tuple(named)
    # One kind of layer: only a few families have the list (Mistral has not).
    kind = FULL if sliding_window(config) is None else SLIDING
    return (kind,) * int(config.num_hidden_layers)


def sliding_window(config: Any) -> int | None:
    """Positions that a sliding layer sees, its own included; None if no layer slides."""
    if getattr(config, "use_sliding_window", True) is False:
        return None
    return getattr(config, "sliding_window", None)


def rope_theta(config: Any) -> float | None:
    """The RoPE base; of full-attention layers where layer types differ. None: not said."""
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get(FULL, parameters)
    theta = parameters.get("rope_theta") or getattr(config, "rope_theta", None)
    return None if theta is None else float(theta)


def head_dim(config: Any) -> int:
    """Of the attention; not every family says."""
    said = getattr(config, "head_dim", None)
    return int(said or config.hidden_size // config.num_attention_heads)


def active_experts(config: Any) -> float:
    """Share of a mixture's experts that a token passes; 1 without experts."""
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    return float(getattr(config, "num_experts_per_tok", 1) / experts) if experts else 1.0


def attention_implementation(config: Any) -> str:
    """Name of the attention that a model runs, one of ours aside: sdpa, eager, ..."""
    name = str(config._attn_implementation)
    return _stands_for.get(name, name)


def window_of(config: Any, layer: int) -> int | None:
    """Positions that a decoder layer's attention sees, its own included; None: all."""
    return sliding_window(config) if layer_types(config)[layer] == SLIDING else None


def model_description(config: Any) -> dict[str, Any]:
    """The config without what depends on the release that wrote it and on where it lies."""
    return {key: value for key, value in config.to_dict().items() if key not in _NOT_THE_MODEL}


# --- the attention interface


def attention(module: torch.nn.Module, name: str) -> Callable[..., Any]:
    """The attention function `name` for a module, as its own modeling file would find it."""
    modeling = sys.modules[type(module).__module__]
    if name == "eager":  # not in the interface: every modeling file has its own
        return modeling.eager_attention_forward
    return modeling.ALL_ATTENTION_FUNCTIONS[name]


_stands_for: dict[str, str] = {}
"""Of each function that was registered here, the one whose masks it takes."""


def register_attention(name: str, function: Callable[..., Any], *, masks_of: str) -> None:
    """Offer an attention function, with masks built as for another's; again: replaces it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    _stands_for[name] = masks_of
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, AttentionMaskInterface()[masks_of])


def set_attention(config: Any, name: str) -> None:
    """Which attention function the modules of a text config call from now on."""
    config._attn_implementation = name


def has_attention_interface(model: Any) -> bool:
    """Do the model's layers leave attention to a function of that interface?"""
    return bool(getattr(model, "_supports_attention_backend", False))


# --- experts


def choose_experts(model: Any) -> None:
    """Multiply a mixture's experts one after the other where the grouped product does not run.

    In place, and only on a CPU: transformers itself asks what a GPU can do.
    """
    chosen = getattr(model.config.get_text_config(), "_experts_implementation", None)
    grouped = chosen == "grouped_mm" and model.device.type == "cpu"
    if grouped and not multiplies_in_groups(model.device, torch.float32):
        model.set_experts_implementation("eager")


# --- loading


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def read_config(path: str, *, trust_remote_code: bool = False) -> Any:
    """The config of a directory or hub id, of FP8 weights such that they load as other dtypes.

    UserError if there is none.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = _one_line(error)
        raise UserError(f"target {path!r} has no readable config.json: {reason}") from error
    # transformers' own FP8 products are compiled while they run, or not there at all.
    if stored_in_fp8(config):
        config.quantization_config["dequantize"] = True
    return config


@contextlib.contextmanager
def loading(path: str) -> Iterator[None]:
    """While a target loads: no bars, no table of what was not loaded, and one line for errors.

    Whoever loads says what of the table matters. UserError for whatever its files can cause.
    """
    logger, reports = logging.getLogger("transformers.modeling_utils"), list[str]()

    def keep(record: logging.LogRecord) -> bool:
        if record.funcName != "log_state_dict_report":
            return True
        reports.append(_COLOUR.sub("", record.getMessage()))
        return False

    logger.addFilter(keep)
    try:
        with quiet():
            yield
    except UserError:
        raise
    # Also a missing quantisation package, a truncated file, weights that do not convert.
    except (OSError, LookupError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        reason = " ".join([_one_line(error), *reports][:2])
        raise UserError(
            f"target {path!r} cannot be loaded as a causal LM: {' '.join(reason.split())[:1000]}"
        ) from error
    finally:
        logger.removeFilter(keep)


def load_pretrained(path: str, **keywords: Any) -> Any:
    """`AutoModelForCausalLM.from_pretrained`, with errors as of `loading`."""
    from transformers import AutoModelForCausalLM

    with loading(path):
        return AutoModelForCausalLM.from_pretrained(path, **keywords)


def stored_in_fp8(config: Any) -> bool:
    """Asked before the weights are loaded, which may take it out of the config."""
    stored = getattr(config, "quantization_config", None)
    return isinstance(stored, dict) and stored.get("quant_method") == "fp8"


def round_decoded(model: Any, dtype: torch.dtype) -> None:
    """What was stored in FP8, in the dtype that was asked for: 5.6 and 5.8 leave it in fp32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def empty_model(path: str, *, trust_remote_code: bool = False) -> Any:
    """The causal LM that a directory's or hub id's config describes, without weights."""
    from transformers import AutoModelForCausalLM

    config = read_config(path, trust_remote_code=trust_remote_code)
    with loading(path), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def read_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a directory or hub id, or None if the directory has none.

    Raises whatever its reader trips over: a damaged tokenizer.json is a bare Exception, a missing
    library an ImportError, and so on.
    """
    folder = Path(path)
    # Without files transformers may invent an empty tokenizer from the model type alone.
    if folder.is_dir() and not [*folder.glob("tokenizer*"), *folder.glob("vocab*")]:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def hide_progress_bars() -> None:
    """For good: the program has one progress display, its own."""
    from transformers.utils import logging

    logging.disable_progress_bar()


@contextlib.contextmanager
def quiet(*, warnings: bool = True) -> Iterator[None]:
    """No progress bars for a while, and without `warnings` nothing but errors."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    hide_progress_bars()
    if not warnings:
        logging.set_verbosity_error()
    try:
        # The GGUF reader's own bar knows no switch, only stderr.
        with contextlib.nullcontext() if warnings else contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def warm_up() -> None:
    """Import and build what loading a model would; where that fails, loading is merely slower."""
    names = [f"transformers.models.auto.{name}_auto" for name in ("modeling", "tokenization")]
    names += [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3")]
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # A table of a thousand regular expressions, built when a model is first loaded.
    with contextlib.suppress(Exception):
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("")


# --- chat templates


def template_compiler() -> Callable[[str], Any] | None:
    """Template source -> jinja template, as `apply_chat_template` does it; None: not to be had."""
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template
    except ImportError:
        return None
    return _compile_jinja_template
