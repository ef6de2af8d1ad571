"""What a drafter's shape must satisfy, each rule on its own so that all that is wrong can be said.

A rule's parameters are fields of `DrafterConfig`; it yields one line for each thing wrong. Rules
whose fields could not be read are left out, so a damaged config.json is judged on the rest.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dflash_ext.errors import UserError
from dflash_ext.ops.attention import HEAD_DIMS, MAX_GQA_RATIO
from dflash_ext.ops.layout import BLOCK_SIZES

FULL, SLIDING = "full_attention", "sliding_attention"
SIZES = (
    *("hidden_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size"),
    *("vocab_size", "max_position_embeddings", "num_target_layers"),
)
Problems = Iterator[str]


def _head_dim(head_dim: int) -> Problems:
    if head_dim not in HEAD_DIMS:
        yield f"drafter head_dim {head_dim} is not supported: use {HEAD_DIMS}"


def _block_size(block_size: int) -> Problems:
    if block_size not in BLOCK_SIZES:
        yield f"block_size {block_size} is not supported: use {BLOCK_SIZES}"


def _heads(num_heads: int, num_kv_heads: int) -> Problems:
    if num_kv_heads < 1:
        return
    if num_heads % num_kv_heads:
        yield f"drafter num_heads {num_heads} must be a multiple of num_kv_heads {num_kv_heads}"
    elif num_heads > num_kv_heads * MAX_GQA_RATIO:
        yield (
            f"drafter num_heads {num_heads} for num_kv_heads {num_kv_heads} is not supported: at "
            f"most {MAX_GQA_RATIO} query heads for each key-value head"
        )


def _width(hidden_size: int, target_hidden_size: int) -> Problems:
    if hidden_size != target_hidden_size:
        yield (
            f"drafter hidden_size {hidden_size} must equal the target's {target_hidden_size}: "
            "embedding and lm_head are the target's own"
        )


def _positive(rms_norm_eps: float, rope_theta: float) -> Problems:
    if not (rms_norm_eps > 0 and rope_theta > 0):
        yield f"rms_norm_eps {rms_norm_eps} and rope_theta {rope_theta} must be above 0"


def _mask(mask_token_id: int, vocab_size: int) -> Problems:
    if not 0 <= mask_token_id < vocab_size:
        yield (
            f"mask_token_id {mask_token_id} is outside the vocabulary 0..{vocab_size - 1}: choose "
            "a row of the target's embedding"
        )


def _layer_count(layer_types: Sequence[str], num_layers: int) -> Problems:
    if len(layer_types) != num_layers:
        yield f"expected {num_layers} layer_types (num_layers), got {len(layer_types)}"


def _layer_kinds(layer_types: Sequence[str]) -> Problems:
    if unknown := set(layer_types) - {FULL, SLIDING}:
        yield f"layer_types {sorted(unknown)} are unknown: use {FULL} or {SLIDING}"


def _window(layer_types: Sequence[str], sliding_window: int | None) -> Problems:
    if SLIDING in layer_types and (sliding_window or 0) < 1:
        yield f"{SLIDING} layers need sliding_window of at least 1, got {sliding_window}"


def _taps(target_layer_ids: Sequence[int]) -> Problems:
    ids = list(target_layer_ids)
    if not ids or len(set(ids)) != len(ids):
        yield f"target_layer_ids {ids} must be one or more distinct layers"
    elif ids != sorted(ids):
        yield (
            f"target_layer_ids {ids} must ascend: serving engines concatenate taps in the order "
            "of the layers"
        )


def _tap_range(target_layer_ids: Sequence[int], num_target_layers: int | None) -> Problems:
    for i in target_layer_ids:
        if i < 0:
            yield f"target_layer_ids has {i}: a tap is the output of a decoder layer, from 0 on"
        elif num_target_layers is not None and i >= num_target_layers:
            yield (
                f"target_layer_ids has {i}, expected ids 0..{num_target_layers - 1} of the "
                f"target's {num_target_layers} decoder layers"
            )


RULES: tuple[Callable[..., Problems], ...] = (
    *(_head_dim, _block_size, _heads, _width, _positive, _mask),
    *(_layer_count, _layer_kinds, _window, _taps, _tap_range),
)


def expand_layer_types(words: tuple[str, ...]) -> tuple[str, ...]:
    """Full names, one a layer, of words like `4xsliding`, `full` or the full names themselves."""
    names: list[str] = []
    for word in words:
        count, times, kind = word.rpartition("x")
        name = {"full": FULL, "sliding": SLIDING}.get(kind, kind)
        if name not in (FULL, SLIDING) or (times and not (count.isdecimal() and int(count))):
            raise UserError(
                f"layer_types has {word!r}: expected full or sliding, with a count where it "
                "repeats, as in 4xsliding full"
            )
        names += [name] * (int(count) if times else 1)
    return tuple(names)


def broken_rules(values: Mapping[str, Any]) -> list[str]:
    """One line for each thing wrong with these fields of a `DrafterConfig`; some may be missing."""
    sizes = [(name, values[name]) for name in SIZES if values.get(name) is not None]
    wrong = [f"drafter {name} {size} must be at least 1" for name, size in sizes if size < 1]
    for rule in RULES:
        names = inspect.signature(rule).parameters
        if all(name in values for name in names):
            wrong += rule(**{name: values[name] for name in names})
    return wrong
