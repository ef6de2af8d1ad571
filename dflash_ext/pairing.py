"""Whether a drafter fits a target: what of the target matters, and what may be wrong with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_ext.layouts import TargetLabel
from dflash_ext.mask_token import named_token_ids
from dflash_ext.target import Target
from dflash_ext.target_loading import load_tokenizer
from dflash_ext.transformers_api import read_config

USED_TOKENS = ("pad_token_id", "eos_token_id", "bos_token_id")


@dataclass(frozen=True)
class TargetFacts:
    """What a drafter must agree with; known without the target's weights."""

    label: TargetLabel
    num_layers: int
    hidden_size: int
    embedding_rows: int
    vocab_sizes: tuple[int, ...]
    """Sizes that a drafter's vocabulary may have; the first one is the one to name."""
    used_tokens: frozenset[int] = frozenset()
    """Pad, eos and bos of config and tokenizer: none of them can be the mask."""
    tap_ids: tuple[int, ...] | None = None
    """Of a target that is loaded and tapped."""

    @classmethod
    def of(cls, target: Target) -> TargetFacts:
        """Of a loaded target, taps included."""
        text = target.model.config.get_text_config()
        rows = target.vocabulary().embedding.shape[0]
        return dataclasses.replace(
            _of_config(target.model.config, target.path),
            embedding_rows=rows,
            vocab_sizes=(target.vocab_size, rows, text.vocab_size),
            tap_ids=target.tap_ids,
        )

    @classmethod
    def read(cls, path: str, *, trust_remote_code: bool = False) -> TargetFacts:
        """From a target's directory or hub id: config.json and tokenizer only.

        UserError if there is none.
        """
        config = read_config(path, trust_remote_code=trust_remote_code)
        return _of_config(config, path, load_tokenizer(path, trust_remote_code))


def _of_config(config: Any, path: str, tokenizer: Any = None) -> TargetFacts:
    text = config.get_text_config()
    return TargetFacts(
        label=TargetLabel(
            path,
            tuple(getattr(config, "architectures", None) or ()),
            getattr(text, "bos_token_id", None),
            getattr(text, "eos_token_id", None),
        ),
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        embedding_rows=text.vocab_size,
        vocab_sizes=(text.vocab_size,),
        used_tokens=frozenset(named_token_ids(USED_TOKENS, config, text, tokenizer)),
    )


def pairing_problems(values: Mapping[str, Any], target: TargetFacts) -> list[str]:
    """One line for each thing that does not fit; of a `DrafterConfig` fields may be missing."""
    wrong: list[str] = []
    taps: Sequence[int] | None = values.get("target_layer_ids")
    width = values.get("target_hidden_size")
    if taps is not None and width is not None:
        K, got = len(taps), target.tap_ids and len(target.tap_ids)
        if width != target.hidden_size:
            count = "a width of" if got is None else f"{got} ×"
            wrong.append(f"expected {K} taps × {width}, got {count} {target.hidden_size}")
        elif got is not None and got != K:
            wrong.append(f"expected {K} taps × {width}, got {got}")
        elif target.tap_ids is not None and tuple(taps) != target.tap_ids:
            wrong.append(f"expected taps {list(taps)}, got {list(target.tap_ids)}")
    if taps is not None and (outside := [i for i in taps if i >= target.num_layers]):
        wrong.append(
            f"taps {outside} are no layers of the target: expected ids 0..{target.num_layers - 1}"
        )
    layers = values.get("num_target_layers")
    if layers is not None and layers != target.num_layers:
        wrong.append(f"expected a target of {layers} layers, got {target.num_layers}")
    vocabulary, mask = values.get("vocab_size"), values.get("mask_token_id")
    if vocabulary is not None and vocabulary not in target.vocab_sizes:
        wrong.append(f"expected a vocabulary of {vocabulary}, got {target.vocab_sizes[0]}")
    if mask is not None and mask >= target.embedding_rows:
        rows = target.embedding_rows
        wrong.append(f"mask token {mask} is no row of the embedding ({rows} rows)")
    if mask is not None and mask in target.used_tokens:
        wrong.append(
            f"mask token {mask} is a pad, eos or bos token of the target: the data holds it, "
            "expected an unused one"
        )
    return wrong
