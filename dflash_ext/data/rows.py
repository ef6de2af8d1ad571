"""What a row of data becomes: samples, or a reason to skip it. And the options that decide it."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_ext.errors import UserError

SUPERVISE = ("all", "last")
REASONING = ("keep", "mask")
# Columns that say which format a row has, and all those that are read.
LEADING = ("messages", "conversations", "ids", "input_ids", "prompt", "text")
FIELDS = (*LEADING, "mask", "loss_mask", "completion", "system", "tools", "sampling")
_SURROGATE = re.compile("[\ud800-\udfff]")
_DETAIL = 200  # characters of a row that may be repeated in a report


class SkipRow(Exception):
    """This row cannot be trained on. `reason`: short, stable; `detail`: this case."""

    def __init__(self, reason: str, detail: str = "") -> None:
        detail = detail[:_DETAIL]
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, eq=False)
class Row:
    """One sample."""

    ids: np.ndarray
    """int32 [n]: token ids."""
    mask: np.ndarray
    """bool [n]: supervised tokens; some two of them are neighbours."""
    cut: str = ""
    """What `max_length` cost: "" no answer, "turns" later answers, "answer" the first one's end."""
    cut_tokens: int = 0
    """Tokens of the conversation that were left out."""
    cut_turns: int = 0
    """Supervised turns that were left out altogether."""


@dataclass(frozen=True)
class ChatOptions:
    """How rows become samples."""

    max_length: int = 4096
    """Tokens of a sample. Longer conversations end after their last whole turn that fits."""
    supervise: str = "all"
    """"all" assistant turns or the "last" one."""
    reasoning: str = "keep"
    """"keep" the thinking before an answer supervised, or "mask" it: context only."""
    date: str = "2026-01-01"
    """What a template that prints today's date prints: a store must not depend on the day."""
    template_kwargs: str = "{}"
    """A JSON object handed to the chat template, such as {"enable_thinking": false}."""

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise UserError(f"max_length {self.max_length}: expected at least 2")
        for name, allowed in (("supervise", SUPERVISE), ("reasoning", REASONING)):
            if getattr(self, name) not in allowed:
                raise UserError(
                    f"{name} {getattr(self, name)!r}: expected one of {', '.join(allowed)}"
                )
        try:
            datetime.date.fromisoformat(self.date)
        except ValueError:
            raise UserError(f"date {self.date!r}: expected one like 2026-01-01") from None
        self.template_arguments()

    def template_arguments(self) -> dict[str, Any]:
        """`template_kwargs` as a dict. UserError if it is no JSON object."""
        try:
            found = json.loads(self.template_kwargs)
        except ValueError as error:
            raise UserError(
                f"template_kwargs {self.template_kwargs!r} is no JSON: {error}"
            ) from None
        if not isinstance(found, dict) or _SURROGATE.search(json.dumps(found, ensure_ascii=False)):
            raise UserError(f"template_kwargs {self.template_kwargs!r}: expected a JSON object")
        return found

    def key(self) -> dict[str, Any]:
        """Every option as JSON-able values, for cache keys; `ChatOptions(**key)` restores them."""
        return dataclasses.asdict(self)


def has_candidate(mask: np.ndarray) -> bool:
    """Is there an anchor candidate: a supervised token whose successor is supervised as well?"""
    return bool((mask[:-1] & mask[1:]).any())
