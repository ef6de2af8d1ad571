"""A conversation whose answers a model gives anew, turn by turn. Pure functions of its messages."""

from __future__ import annotations

import json
from typing import Any

from dflash_ext.data.formats import REASONING_FIELDS, Conversation, Message


def next_prompt(conversation: Conversation, answers: list[Message]) -> list[Message] | None:
    """The messages that the next answer answers; None if there is nothing left to ask.

    conversation: of `parse_prompt`. Every user's turn is asked, on top of the model's own answers.
    What tools said to someone else's calls cannot be asked anew: such a conversation is context as
    it stands, and only its end is answered.
    """
    if answers and (answers[-1].get("unfinished") or answers[-1].get("tool_calls")):
        return None
    if _uses_tools(conversation):
        return conversation.messages if not answers else None
    asked = [m for m in conversation.messages if m["role"] == "user"]
    if len(answers) == len(asked):
        return None
    prompt = [m for m in conversation.messages if m["role"] == "system"]
    for question, answer in zip(asked, answers):
        prompt += [question, answer]
    return [*prompt, asked[len(answers)]]


def answered_row(conversation: Conversation, answers: list[Message]) -> dict[str, Any]:
    """The row of a conversation with its new answers (at least one), to be prepared."""
    row: dict[str, Any] = {"tools": conversation.tools} if conversation.tools else {}
    if _uses_tools(conversation):
        return {"prompt": conversation.messages, "completion": answers, **row}
    prompt = next_prompt(conversation, [{"role": "assistant"}] * (len(answers) - 1))
    assert prompt is not None
    turns = iter(answers)
    messages = [m if m["role"] != "assistant" else next(turns) for m in prompt]
    return {"messages": [*messages, *turns], **row}


def request(conversation: Conversation, prompt: list[Message]) -> dict[str, Any]:
    """Messages and tools as the API wants them."""
    body: dict[str, Any] = {"messages": [_spoken(message) for message in prompt]}
    if conversation.tools:
        body["tools"] = conversation.tools
    return body


def _uses_tools(conversation: Conversation) -> bool:
    return any(m["role"] == "tool" or "tool_calls" in m for m in conversation.messages)


def _spoken(message: Message) -> Message:
    """Without reasoning, which templates drop from earlier turns and some servers refuse."""
    out = {k: v for k, v in message.items() if k not in (*REASONING_FIELDS, "unfinished")}
    if "tool_calls" in out:
        out["tool_calls"] = [
            {**call, "function": {**function, "arguments": _as_text(function["arguments"])}}
            for call in out["tool_calls"]
            for function in [call["function"]]
        ]
    return out


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
