"""Conversations to rendered text and supervised characters, by asking the chat template.

Supervised is what the model would have written itself: the assistant's text and the token that
ends its turn. No template is known by name; its renders say everything:

    prompt = render(turns before, generation prompt)      what the model is given
    text   = render(turns before + this one)              must begin with `prompt`
    frame  = render(turns before + a sentinel answer)     what the template writes around any answer
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from dflash_ext.data.append_only import AppendOnly
from dflash_ext.data.formats import REASONING_FIELDS, Conversation, Message
from dflash_ext.data.rows import SkipRow
from dflash_ext.data.templates import (
    SENTINEL,
    Renderer,
    added_token_pattern,
    end_of_turn,
)

_CHANGES = "template changes the assistant's text"
_APART = "template's answer does not extend its prompt"
_DROPS = "template leaves out the reasoning"
_MAX_FRAMES = 16
# Reasoning written into the text; a prompt that opens the block leaves the first tag to it.
_INLINE = re.compile(r"\s*(?:<think>)?(.*?)</think>(.*)", re.DOTALL)


@dataclass(frozen=True)
class Sample:
    """A text and its supervised character ranges [start, end), one per answer, in order."""

    text: str
    spans: list[tuple[int, int]]


@dataclass(frozen=True)
class _Turn:
    text: str
    """The conversation up to and with this answer."""
    start: int
    end: int


@dataclass(frozen=True)
class _Frame:
    """What a template writes around an answer."""

    leading: str
    trailing: str
    end: int
    """Characters of `trailing` that belong to the answer: through the end-of-turn token."""
    ending: str
    """The end-of-turn token itself."""


class SpanFinder:
    """Finds what to supervise in one tokenizer's conversations. Keep it: it caches frames."""

    def __init__(self, renderer: Renderer, *, supervise: str, reasoning: str) -> None:
        self._render = renderer
        self._last_only, self._mask_reasoning = supervise == "last", reasoning == "mask"
        self._added = added_token_pattern(renderer.tokenizer)
        self._append_only = AppendOnly(renderer)
        self._frames: list[_Frame] = []  # last used first

    def samples(self, conversation: Conversation) -> list[Sample]:
        """One sample, or several where the template rewrites history (drops earlier thinking).

        Then every answer is in the sample in which it is rendered as the model wrote it, and in
        no other is it supervised. Raises SkipRow.
        """
        reasons: list[SkipRow] = []
        for messages in _spellings(conversation.messages):
            try:
                return self._samples(replace(conversation, messages=messages))
            except SkipRow as skip:
                reasons.append(skip)
        raise reasons[0]

    def _samples(self, conversation: Conversation) -> list[Sample]:
        answers = conversation.answers()
        answers = answers[-1:] if self._last_only else answers
        quick = self._quick(conversation, answers)
        if quick is not None:
            return [quick]
        samples: list[Sample] = []
        for i in reversed(answers):
            turn = self._turn(conversation, i)
            if samples and samples[-1].text.startswith(turn.text[: turn.end]):
                samples[-1].spans.insert(0, (turn.start, turn.end))
            else:
                samples.append(Sample(turn.text, [(turn.start, turn.end)]))
        return samples[::-1]

    def _quick(self, conversation: Conversation, answers: list[int]) -> Sample | None:
        """The sample from one render, where that proves everything; else the long way decides."""
        if any(_is_special(conversation.messages[i]) for i in answers):
            return None
        shown = self._append_only.show(conversation)
        if shown is None:
            return None
        spans = []
        for i in answers:
            start = shown.starts[i] + len(shown.header)
            body = shown.text[start : shown.starts[i + 1]]
            if not shown.text.startswith(shown.header, shown.starts[i]):
                return None
            try:
                span = self._known(body + shown.footer, conversation.messages[i]["content"])
            except SkipRow:
                return None
            if span is None or span[1] > len(body):
                return None
            spans.append((start + span[0], start + span[1]))
        return Sample(shown.text, spans)

    def _turn(self, conversation: Conversation, index: int) -> _Turn:
        before, answer = conversation.messages[:index], conversation.messages[index]

        def show(message: Message) -> str:
            return self._render([*before, message], generation=False, tools=conversation.tools)

        prompt = self._render(before, generation=True, tools=conversation.tools)
        text = show(answer)
        try:
            if text.startswith(prompt):
                body = text[len(prompt) :]
                span = None if _is_special(answer) else self._known(body, answer["content"])
                start, end = span or self._probed(prompt, body, answer, show)
                turn = _Turn(text, len(prompt) + start, len(prompt) + end)
            else:
                turn = self._composed(prompt, show(_message(SENTINEL)), answer)
        except SkipRow as skip:
            raise SkipRow(skip.reason, f"message {index} {skip.detail}".rstrip()) from None
        if answer.get("unfinished"):  # without the end of turn, which a limit wrote
            *_, ending = self._added.finditer(turn.text, turn.start, turn.end)
            turn = replace(
                turn, end=turn.start + len(turn.text[turn.start : ending.start()].rstrip())
            )
        return turn

    def _probed(
        self, prompt: str, body: str, answer: Message, show: Callable[[Message], str]
    ) -> tuple[int, int]:
        """[start, end) in `body`, which extends `prompt`, found with the help of a sentinel."""
        probe = show(_message(SENTINEL))
        if not probe.startswith(prompt):
            raise SkipRow(_APART)
        leading, found, trailing = probe[len(prompt) :].partition(SENTINEL)
        if not found or SENTINEL in trailing:
            raise SkipRow(_CHANGES)
        if answer.get("tool_calls"):
            start, end = self._calls(leading, body, answer)
        else:
            start, end = self._answer(leading, trailing, prompt, body, answer)
        if self._mask_reasoning and thoughts_of(answer)[0]:
            # Behind the reasoning comes what the template writes for the answer without it.
            alone = show(_without_thoughts(answer))
            own = alone[len(prompt) :].removeprefix(leading)
            if not alone.startswith(prompt) or not body.endswith(own):
                raise SkipRow(_CHANGES, "when its reasoning is left out")
            start = max(start, len(body) - len(own))
        return start, end

    def _composed(self, prompt: str, probe: str, answer: Message) -> _Turn:
        """The turn where the template only shows answers without what its own prompt ends with.

        A prompt that opens or skips the thinking, then answers shown as if there were none (R1,
        QwQ): what the model reads and writes is the prompt, the answer in full, the end of turn.
        """
        shared = _shared(prompt, probe)
        found, trailing = probe[shared:].startswith(SENTINEL), probe[shared + len(SENTINEL) :]
        thoughts, content = thoughts_of(answer)
        opened = prompt.rstrip().endswith("<think>")
        # Anything else between the two would be a header that the prompt lacks.
        if not found or SENTINEL in trailing or answer.get("tool_calls"):
            raise SkipRow(_APART)
        if opened != bool(thoughts):
            detail = "the answer has no reasoning" if opened else "the answer has reasoning"
            raise SkipRow(_APART, f"and {detail} but the prompt ends with {prompt[-20:]!r}")
        frame = self._frame("", trailing)
        before = f"{thoughts}\n</think>\n\n" if thoughts else ""
        body = f"{before}{content.strip()}{trailing}"
        _, end = self._place(frame, body, thoughts + content)
        start = len(prompt) + (len(before) if self._mask_reasoning else 0)
        return _Turn(prompt + body, start, len(prompt) + end)

    def _frame(self, leading: str, trailing: str) -> _Frame:
        end = end_of_turn(self._render.tokenizer, trailing)
        return _Frame(leading, trailing, end, self._added.findall(trailing[:end])[-1])

    def _known(self, body: str, content: str) -> tuple[int, int] | None:
        """The answer's place in `body`, if a frame seen earlier explains every character of it."""
        for i, frame in enumerate(self._frames):
            before, after = len(frame.leading), len(body) - len(frame.trailing)
            if not body.startswith(frame.leading) or not body.endswith(frame.trailing):
                continue
            if before < after and body[before:after] in (content, content.strip()):
                self._frames.insert(0, self._frames.pop(i))
                return self._place(frame, body, content)
        return None

    def _answer(
        self, leading: str, trailing: str, prompt: str, body: str, answer: Message
    ) -> tuple[int, int]:
        """[start, end) in `body` of an answer of text, perhaps after reasoning."""
        if not body.endswith(trailing):
            raise SkipRow(_CHANGES)
        frame = self._frame(leading, trailing)
        own = squeeze(body.removeprefix(leading).removesuffix(trailing))
        thoughts, content = thoughts_of(answer)
        whole = squeeze(answer["content"])
        if thoughts and squeeze(content) != whole == own:
            # Written inline and rendered literally.
            if prompt.rstrip().endswith("</think>"):
                raise SkipRow(_DROPS, "its prompt has ended the thinking")
        elif thoughts and REASONING_FIELDS[0] in answer:
            # Rendered as <think>reasoning</think>content: the tags are the model's to write too.
            if not own.endswith(whole):
                raise SkipRow(_CHANGES)
            if not self._mask_reasoning and squeeze(thoughts) not in own.removesuffix(whole):
                raise SkipRow(_DROPS, "(its answer alone can be had with reasoning masked)")
        else:
            # A generation prompt may open the think block which the answer's text opens itself.
            opened = whole.removesuffix(own)
            if own != whole and (opened == whole or not squeeze(prompt).endswith(opened)):
                raise SkipRow(_CHANGES)
            if not thoughts and frame not in self._frames:
                self._frames = [frame, *self._frames][:_MAX_FRAMES]
        return self._place(frame, body, answer["content"] + thoughts)

    def _place(self, frame: _Frame, body: str, content: str) -> tuple[int, int]:
        if frame.ending in content:
            raise SkipRow("answer contains the end-of-turn token", frame.ending)
        end = len(body) - len(frame.trailing) + frame.end
        return _behind_boilerplate(frame.leading, body), end

    def _calls(self, leading: str, body: str, answer: Message) -> tuple[int, int]:
        """[start, end) in `body` of an answer that calls tools: up to the last special token."""
        thoughts, content = thoughts_of(answer)
        names = [call["function"]["name"] for call in answer["tool_calls"]]
        squeezed = squeeze(body)
        if not all(squeeze(text) in squeezed for text in (*names, content)):
            raise SkipRow("template leaves out tool calls or the text beside them")
        if not self._mask_reasoning and squeeze(thoughts) not in squeezed:
            raise SkipRow(_DROPS)
        matches = list(self._added.finditer(body))
        if not matches or body[matches[-1].end() :].strip():
            raise SkipRow("template has no end-of-turn token", "after tool calls")
        return _behind_boilerplate(leading, body), matches[-1].end()


def _shared(a: str, b: str) -> int:
    """Characters with which both texts begin."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _behind_boilerplate(leading: str, body: str) -> int:
    """Where the model's own text starts in `body`.

    What the template writes before ANY answer (an empty think block) is not the model's; mere white
    space is: it lies behind the prompt, so the model has to produce it.
    """
    return len(leading) if leading.strip() and body.startswith(leading) else 0


def _message(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _is_special(answer: Message) -> bool:
    return "tool_calls" in answer or bool(thoughts_of(answer)[0])


def thoughts_of(answer: Message) -> tuple[str, str]:
    """(reasoning, text) of an answer; the reasoning from its field or from inside its content."""
    content: str = answer["content"] or ""
    thoughts = answer.get(REASONING_FIELDS[0], "")
    inline = _INLINE.fullmatch(content) if "</think>" in content else None
    if thoughts or inline is None or not (inline[2].strip() or "tool_calls" in answer):
        return thoughts, content
    return inline[1].strip("\n"), inline[2].lstrip("\n")


def _without_thoughts(answer: Message) -> Message:
    rest = {name: value for name, value in answer.items() if name not in REASONING_FIELDS}
    return {**rest, "content": thoughts_of(answer)[1]}


def _spellings(messages: list[Message]) -> Iterator[list[Message]]:
    """The same conversation in the ways templates expect it, the most usual first."""
    inline = [
        bool(m["role"] == "assistant" and REASONING_FIELDS[0] not in m and thoughts_of(m)[0])
        for m in messages
    ]
    calls = any("tool_calls" in message for message in messages)
    if not any(inline) and not calls:
        yield messages
        return
    for as_text, split in product((False, True) if calls else (False,), (True, False)):
        if split and not any(inline):
            continue
        spelled = [_split(m) if split and hit else m for m, hit in zip(messages, inline)]
        yield [_text_calls(message) for message in spelled] if as_text else spelled


def _split(answer: Message) -> Message:
    return {**_without_thoughts(answer), **dict.fromkeys(REASONING_FIELDS, thoughts_of(answer)[0])}


def _text_calls(message: Message) -> Message:
    """Arguments as JSON text, and no content rather than an empty one."""
    if "tool_calls" not in message:
        return message
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message["tool_calls"]
    ]
    return {**message, "content": message["content"] or None, "tool_calls": calls}


def squeeze(text: str) -> str:
    """Text but for white space and Unicode spelling, which templates and tokenizers may change."""
    return "".join(unicodedata.normalize("NFKC", text).split())
