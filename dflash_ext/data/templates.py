"""Rendering chat templates: one conversation to the text its target would read.

A template is a program of its author's. It runs in transformers' sandbox, through the function
that `apply_chat_template` itself ends in; called directly it costs a third, and a row needs several
renders.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from typing import Any

from dflash_ext.data.formats import Message
from dflash_ext.data.rows import SkipRow
from dflash_ext.errors import UserError
from dflash_ext.transformers_api import read_tokenizer, template_compiler

# Survives trimming, contains nothing a template or a tokenizer's added tokens could react to.
SENTINEL = "Zq7Sentinel7qZ"


def load_tokenizer(target: str | None, *, trust_remote_code: bool) -> Any:
    """The tokenizer of a directory or hub id; none: the quickstart's. UserError if it fails."""
    from dflash_ext.data.registry import smollm2_dir

    path = target or str(smollm2_dir())
    try:
        tokenizer = read_tokenizer(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(f"tokenizer of {path!r} cannot be loaded: {reason}") from error
    if tokenizer is None:
        raise UserError(f"{path} holds no tokenizer: expected its files there, or another --target")
    return tokenizer


def check_tokenizer(tokenizer: Any) -> None:
    """UserError, naming the tokenizer's path, if it has no chat template or no fast backend."""
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"tokenizer {tokenizer_name(tokenizer)} has no chat template; expected one in its "
            "tokenizer_config.json or chat_template.jinja. Use an instruct model or add a template"
        )
    check_backend(tokenizer)


def check_backend(tokenizer: Any) -> None:
    """UserError if there is no tokenizer.json behind it."""
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"tokenizer {tokenizer_name(tokenizer)} reports no character offsets, which the loss "
            "mask needs; expected one with a tokenizer.json"
        )


def tokenizer_name(tokenizer: Any) -> str:
    return getattr(tokenizer, "name_or_path", "") or "(in memory)"


def render(
    tokenizer: Any,
    messages: list[Message],
    *,
    generation: bool,
    tools: list[Any] | None = None,
    **arguments: Any,
) -> str:
    """The template's text. Raises SkipRow where the template refuses the conversation."""
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=generation, **arguments
        )
    # A template is a program of its author: it may raise anything on input it does not expect.
    except Exception as error:
        raise refusal(error) from None
    return str(text)


def refusal(error: Exception) -> SkipRow:
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return SkipRow("template refused the conversation", line)


class Renderer:
    """`render` for many rows: compiled once, with the date and the options of a run.

    Raises UserError for a tokenizer without a chat template.
    """

    def __init__(self, tokenizer: Any, *, date: str, arguments: dict[str, Any]) -> None:
        check_tokenizer(tokenizer)
        self.tokenizer = tokenizer
        self._arguments = arguments
        # What templates ask for the date. Only the direct call can be given a function.
        self._today = {"strftime_now": datetime.datetime.fromisoformat(date).strftime}
        self._special = dict(tokenizer.special_tokens_map)
        self._compile = template_compiler()
        self._compiled: dict[bool, Any] = {}
        self._direct = self._is_direct()

    def __call__(
        self, messages: list[Message], *, generation: bool, tools: list[Any] | None = None
    ) -> str:
        if not self._direct:
            return self._public(messages, generation=generation, tools=tools)
        try:
            return str(
                self._template(tools).render(
                    messages=messages,
                    tools=tools,
                    documents=None,
                    add_generation_prompt=generation,
                    **{**self._special, **self._today, **self._arguments},
                )
            )
        except Exception as error:
            raise refusal(error) from None

    def stream(self, messages: Any, tools: list[Any] | None, *, generation: bool) -> Iterator[str]:
        """The text piece by piece, as it is written. Only where there is a `direct_template`."""
        return self._template(tools).generate(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=generation,
            **{**self._special, **self._today, **self._arguments},
        )

    def direct_template(self, tools: list[Any] | None) -> tuple[Any, str] | None:
        """(jinja environment, source) of the template, if it is called directly."""
        if not self._direct:
            return None
        source = self.tokenizer.get_chat_template(None, tools)
        return self._template(tools).environment, source

    def _template(self, tools: list[Any] | None) -> Any:
        with_tools = tools is not None
        if with_tools not in self._compiled:
            assert self._compile is not None
            source = self.tokenizer.get_chat_template(None, tools)
            self._compiled[with_tools] = self._compile(source)
        return self._compiled[with_tools]

    def _is_direct(self) -> bool:
        """Does the direct call give what transformers' public one gives, in this version of it?"""
        if self._compile is None:
            return False
        self._direct = True
        today, self._today = self._today, {}
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        same = all(
            _outcome(self, messages[:count], generation)
            == _outcome(self._public, messages[:count], generation)
            for count, generation in ((1, True), (2, False))
        )
        self._today = today
        return same

    def _public(
        self, messages: list[Message], *, generation: bool, tools: list[Any] | None = None
    ) -> str:
        return render(
            self.tokenizer, messages, generation=generation, tools=tools, **self._arguments
        )


def _outcome(call: Any, messages: list[Message], generation: bool) -> str:
    try:
        return str(call(messages, generation=generation))
    except SkipRow as skip:
        return str(skip)


def end_of_turn(tokenizer: Any, text: str) -> int:
    """Characters of `text`, which follows a turn's content, up to the end of its end-of-turn token.

    Raises SkipRow if no special token is in `text`: then nothing ends the turn.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    for token, (_, end) in zip(encoded["input_ids"], encoded["offset_mapping"]):
        if token in special:
            return int(end)
    raise SkipRow("template has no end-of-turn token", f"an answer is followed by {text!r}")


def added_token_pattern(tokenizer: Any) -> re.Pattern[str]:
    """Matches the tokens that are split off before everything else, the longest first."""
    contents = sorted((t.content for t in tokenizer.added_tokens_decoder.values()), key=len)
    return re.compile("|".join(re.escape(c) for c in reversed(contents) if c) or r"(?!)")
