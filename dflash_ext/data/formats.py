"""A row as people write it, in any usual format, to one of three things that samples are made of.

Nothing here knows a template or a tokenizer. Whatever JSON can hold ends as a `Conversation`, a
`Text`, `Tokens`, or a SkipRow.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from dflash_ext.data.rows import SkipRow

Message = dict[str, Any]

# Names of one field in the wild. Templates read one or another, so a message carries all of them.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_FUNCTION_CALL = "function_call"
_ROW_NAMES = "messages, conversations, prompt + completion, text, or ids + mask"
# A conversation of eight million characters is no conversation; tokenising it would take minutes.
MAX_CHARACTERS = 8_000_000


@dataclass(frozen=True)
class Conversation:
    messages: list[Message]
    """Alternating turns of str content, after at most one system message; ends with an answer."""
    tools: list[Any] | None
    supervised_from: int
    """Answers before this index are context."""

    def answers(self) -> list[int]:
        """Indices of the messages to be supervised."""
        return [
            i
            for i, message in enumerate(self.messages)
            if message["role"] == "assistant" and i >= self.supervised_from
        ]


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Tokens:
    ids: np.ndarray
    """int64 [n]."""
    mask: np.ndarray
    """bool [n]."""


def parse_json(row: bytes) -> Any:
    """The value of one row's JSON text. Raises SkipRow, and nothing else."""
    try:
        return json.loads(row.decode())  # of bytes, json would guess UTF-16 as well
    except UnicodeDecodeError:
        raise SkipRow("not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise SkipRow("not JSON", str(error).partition("\n")[0]) from None


def parse_row(row: Any) -> Conversation | Text | Tokens:
    """What the row holds. Raises SkipRow with the reason, and nothing else."""
    try:
        return _parse(row)
    except RecursionError:
        raise SkipRow("row is nested too deeply") from None


def _parse(row: Any) -> Conversation | Text | Tokens:
    if isinstance(row, list):
        row = {"messages": row}
    if not isinstance(row, dict):
        raise SkipRow("row is not an object", type(row).__name__)
    row = {name: value for name, value in row.items() if value is not None}
    for name in ("messages", "conversations"):
        if name in row:
            return _conversation(_messages(row[name], name, row.get("system")), row.get("tools"))
    for ids, mask in (("ids", "mask"), ("input_ids", "loss_mask")):
        if ids in row and mask in row:
            return _tokens(row[ids], row[mask])
    if "prompt" in row and "completion" in row:
        prompt = _side(row["prompt"], "user", "prompt")
        completion = _side(row["completion"], "assistant", "completion")
        system = _system(row.get("system"))
        return _conversation(
            [*system, *prompt, *completion], row.get("tools"), len(system) + len(prompt)
        )
    if "text" in row:
        if not isinstance(row["text"], str):
            raise SkipRow("text is not a string", type(row["text"]).__name__)
        _check_text(row["text"])
        if not row["text"].strip():
            raise SkipRow("text is empty")
        return Text(row["text"])
    raise SkipRow("row has no known columns", f"expected {_ROW_NAMES}; found {list(row)[:8]}")


def parse_prompt(row: Any) -> Conversation:
    """The turns of a row up to and with the last that waits for an answer, which is not its own.

    Answers that will be written anew need not be any good here. Also rows with only a `prompt`.
    Raises SkipRow, and nothing else.
    """
    if isinstance(row, dict) and row.get("prompt") is not None and row.get("messages") is None:
        prompt = row["prompt"]
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        row = {"messages": turns, "tools": row.get("tools"), "system": row.get("system")}
    try:
        return _parse_prompt(row)
    except RecursionError:
        raise SkipRow("row is nested too deeply") from None


def _parse_prompt(row: Any) -> Conversation:
    if isinstance(row, list):
        row = {"messages": row}
    if not isinstance(row, dict):
        raise SkipRow("row is not an object", type(row).__name__)
    name = "conversations" if row.get("messages") is None else "messages"
    if row.get(name) is None:
        raise SkipRow("row has no known columns", "expected messages, conversations or prompt")
    values = row[name]
    if isinstance(values, list) and not any(map(_uses_tools, values)):
        values = [_blank(message) for message in values]
    messages = _messages(values, name, row.get("system"))
    while messages and messages[-1]["role"] not in ("user", "tool"):
        messages.pop()
    if not messages:
        raise SkipRow("no user turn")
    _check_roles([message["role"] for message in messages])
    return Conversation(messages, _tools(row.get("tools")), 0)


def _uses_tools(message: Any) -> bool:
    if not isinstance(message, dict):
        return False
    role = message.get("role", message.get("from"))
    is_tool = isinstance(role, str) and _ROLES.get(role) == "tool"
    return bool(message.get("tool_calls")) or role == _FUNCTION_CALL or is_tool


def _blank(message: Any) -> Any:
    """An answer without its content."""
    role = message.get("role", message.get("from")) if isinstance(message, dict) else None
    is_answer = isinstance(role, str) and _ROLES.get(role) == "assistant"
    return {"role": role, "content": "-"} if is_answer else message


def _side(value: Any, role: str, name: str) -> list[Message]:
    return _messages([{"role": role, "content": value}] if isinstance(value, str) else value, name)


def _system(value: Any) -> list[Any]:
    return [{"role": "system", "content": value}] if value is not None else []


def _messages(value: Any, name: str, system: Any = None) -> list[Message]:
    if not isinstance(value, list):
        raise SkipRow(f"{name} is not a list", type(value).__name__)
    if not value:
        raise SkipRow(f"{name} is empty")
    return [_message(message) for message in (*_system(system), *value)]


def _message(message: Any) -> Message:
    if not isinstance(message, dict):
        raise SkipRow("message is not an object", type(message).__name__)
    share_gpt = "from" in message and "role" not in message
    role, content = (
        message.get(k) for k in (("from", "value") if share_gpt else ("role", "content"))
    )
    if role == _FUNCTION_CALL:
        return {"role": "assistant", "content": "", "tool_calls": [_call(_json_object(content))]}
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join(dict.fromkeys(_ROLES.values()))
        raise SkipRow("unknown role", f"{role!r}, expected one of {known}")
    out: Message = {"role": _ROLES[role]}
    calls = message.get("tool_calls")
    if calls:
        if out["role"] != "assistant" or not isinstance(calls, list):
            raise SkipRow("tool_calls is not a list of an assistant's calls", type(calls).__name__)
        out["tool_calls"] = [_call(call) for call in calls]
    thoughts = next((message[k] for k in REASONING_FIELDS if message.get(k) is not None), "")
    out["content"], more_thoughts = _content(content, empty_allowed=bool(calls))
    thoughts = more_thoughts or thoughts
    if not isinstance(thoughts, str):
        raise SkipRow("reasoning is not a string", type(thoughts).__name__)
    if out["role"] == "assistant" and thoughts.strip():
        out.update(dict.fromkeys(REASONING_FIELDS, thoughts))
    if message.get("unfinished") is True:
        out["unfinished"] = True  # cut by a limit: the model did not end this turn
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            _check_text(message[name])
            out[name] = message[name]
    for text in (out["content"], thoughts):
        _check_text(text)
    return out


def _content(content: Any, *, empty_allowed: bool) -> tuple[str, str]:
    """(text, reasoning) of a string or a list of parts."""
    if content is None and empty_allowed:
        return "", ""
    if content is None:
        raise SkipRow("content is null")
    if isinstance(content, str):
        return content, ""
    if not isinstance(content, list):
        raise SkipRow("content is not a string", type(content).__name__)
    texts: dict[str, list[str]] = {"text": [], "thinking": []}
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        name = "thinking" if kind in ("thinking", "reasoning") else "text"
        text = part.get(name, part.get("text")) if isinstance(part, dict) else None
        if kind not in ("text", "thinking", "reasoning") or not isinstance(text, str):
            raise SkipRow("content has a part that is not text", f"{kind!r}")
        texts[name].append(text)
    if not content and not empty_allowed:
        raise SkipRow("content has no parts")
    return "".join(texts["text"]), "".join(texts["thinking"])


def _call(call: Any) -> Message:
    """{"type", "id"?, "function": {"name", "arguments"}} from that or from the bare function."""
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise SkipRow("tool call has no function name")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = {}
    elif isinstance(arguments, str):
        # The API's form is JSON in a string; templates expect the object.
        arguments = _json_object(arguments)
    elif not isinstance(arguments, dict):
        raise SkipRow("tool call's arguments are no JSON object", type(arguments).__name__)
    _check_text(json.dumps([name, arguments], ensure_ascii=False))
    out: Message = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if isinstance(call.get("id"), str):
        _check_text(call["id"])
        out["id"] = call["id"]
    return out


def _json_object(text: Any) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (TypeError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise SkipRow("tool call's arguments are no JSON object", repr(text)[:80])
    return found


def _check_text(text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise SkipRow("row is too long", f"{len(text)} characters, at most {MAX_CHARACTERS}")
    if not is_utf8(text):
        raise SkipRow("text is not UTF-8", "it holds a lone surrogate")


def is_utf8(text: str) -> bool:
    """Can a tokenizer read it? JSON can spell lone surrogates, UTF-8 cannot."""
    try:
        return text.isascii() or text.encode() is not None
    except UnicodeEncodeError:
        return False


def _conversation(messages: list[Message], tools: Any, supervised_from: int = 0) -> Conversation:
    roles = [message["role"] for message in messages]
    _check_roles(roles)
    if "assistant" not in roles:
        raise SkipRow("no assistant turn")
    for message in messages:
        if message["role"] == "assistant" and not (
            message["content"].strip() or message.get("tool_calls")
        ):
            raise SkipRow("assistant's content is empty")
    last = max(i for i, role in enumerate(roles) if role == "assistant")
    if last < supervised_from:
        raise SkipRow("no assistant turn", "in the completion")
    if any(message.get("unfinished") for message in messages[:last]):
        raise SkipRow("an unfinished answer is not the last")
    if sum(len(message["content"]) for message in messages) > MAX_CHARACTERS:
        raise SkipRow("row is too long", f"more than {MAX_CHARACTERS} characters")
    return Conversation(messages[: last + 1], _tools(tools), supervised_from)


def _check_roles(roles: list[str]) -> None:
    turns = roles[1:] if roles[0] == "system" else roles
    if "system" in turns:
        raise SkipRow("system message is not the first")
    if not turns:
        raise SkipRow("only a system message")
    if turns[0] == "assistant":
        raise SkipRow("assistant speaks first")
    if turns[0] == "tool" or ("user", "tool") in pairwise(turns):
        raise SkipRow("a tool answers nobody")
    if ("tool", "user") in pairwise(turns) or any(
        a == b for a, b in pairwise(turns) if a != "tool"
    ):
        raise SkipRow("roles do not alternate", ", ".join(turns[:6]))


def _tools(tools: Any) -> list[Any] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError:
            raise SkipRow("tools is not a list of objects", "a string that is no JSON") from None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise SkipRow("tools is not a list of objects", type(tools).__name__)
    _check_text(json.dumps(tools, ensure_ascii=False))
    return tools


def _tokens(ids: Any, mask: Any) -> Tokens:
    arrays = []
    checks: list[tuple[str, Any, str, Callable[[np.ndarray], bool]]] = [
        ("ids", ids, "iu", lambda a: bool((a >= 0).all()) and bool((a < 2**31).all())),
        ("mask", mask, "iub", lambda a: bool(((a == 0) | (a == 1)).all())),
    ]
    for name, value, kinds, valid in checks:
        try:
            array = np.asarray(value)
        except (ValueError, TypeError, OverflowError):
            array = np.empty((), dtype=object)
        if array.ndim == 1 and array.size == 0:
            raise SkipRow("no tokens")
        if array.ndim != 1 or array.dtype.kind not in kinds or not valid(array):
            raise SkipRow(f"{name} is not a list of {'token ids' if name == 'ids' else '0 and 1'}")
        arrays.append(array)
    if len(arrays[0]) != len(arrays[1]):
        raise SkipRow(
            "ids and mask differ in length",
            f"{len(arrays[0])} token ids but {len(arrays[1])} mask values",
        )
    return Tokens(arrays[0].astype(np.int64), arrays[1].astype(np.bool_))
