"""Which token stands in the MASK slots of a block (semantics.md, "Mask token")."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from dflash_ext.errors import UserError

log = logging.getLogger(__name__)

# Rows known to be free in a family's embedding.
FAMILY_MASK_TOKENS = {
    "qwen3": 151669,
    "qwen3_moe": 151669,
    "qwen3_5": 248070,
    "qwen3_5_text": 248070,
    "qwen3_5_moe": 248070,
    "qwen3_5_moe_text": 248070,
}
# Vocabulary entries that tokenizer authors set aside: <unused0>, <|reserved_special_token_0|>, …
RESERVED = re.compile(r"^[<\[].*(mask|unused|reserved|placeholder|empty_output).*[>\]]$", re.I)


def resolve_mask_token_id(
    explicit: int | None, tokenizer: Any, config: Any, vocab_rows: int
) -> int:
    """The id of the MASK slots: explicit, the family's, the tokenizer's, or a reserved row.

    `vocab_rows` is the number of rows of the target's embedding; `tokenizer` may be None. The
    choice is logged. UserError if the explicit id is no such row or is a pad, eos or bos token,
    or if there is nothing to choose from.
    """
    text_config = config.get_text_config()
    names = ("pad_token_id", "eos_token_id", "bos_token_id")
    in_use = named_token_ids(names, config, text_config, tokenizer)
    if explicit is not None:
        if not 0 <= explicit < vocab_rows or explicit in in_use:
            why = "a pad, eos or bos token" if explicit in in_use else "no row of the embedding"
            raise UserError(
                f"mask_token_id {explicit} is {why}: expected an unused id from 0 to "
                f"{vocab_rows - 1} other than {sorted(in_use)}"
            )
        return explicit
    for why, token in _choices(tokenizer, text_config.model_type):
        if token is not None and 0 <= token < vocab_rows and token not in in_use:
            text = tokenizer.convert_ids_to_tokens(token) if tokenizer is not None else None
            log.info("mask token: id %d %s(%s)", token, f"{text!r} " if text else "", why)
            return token
    raise UserError(
        "no mask token found: the tokenizer has no mask, reserved or unused entry; "
        f"give mask_token_id, a row of the embedding (0 to {vocab_rows - 1}) the data never uses"
    )


def _choices(tokenizer: Any, model_type: str) -> list[tuple[str, int | None]]:
    """(reason, id) in order of preference; ids are not checked yet."""
    choices = [("known for the family", FAMILY_MASK_TOKENS.get(model_type))]
    if tokenizer is None:
        return choices
    vocabulary = tokenizer.get_vocab()
    reserved = sorted(i for token, i in vocabulary.items() if RESERVED.match(token))
    return [
        *choices,
        ("the tokenizer's mask token", tokenizer.mask_token_id),
        *(("reserved by the tokenizer", i) for i in reserved),
        ("a padded row that no token uses", max(vocabulary.values(), default=-1) + 1),
    ]


def named_token_ids(names: Sequence[str], *sources: Any) -> set[int]:
    """Ids that configs or tokenizers give under `names` (each an id, a list of ids, or absent)."""
    found: set[int] = set()
    for source in sources:
        for name in names:
            value = getattr(source, name, None)
            if value is not None:
                found.update(value if isinstance(value, (list, tuple)) else [value])
    return found
