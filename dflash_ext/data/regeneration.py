"""What is asked of a target, and what becomes of it: rows to items, answers back to rows."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_ext.data.formats import Conversation, parse_json, parse_prompt
from dflash_ext.data.journal import Journal
from dflash_ext.data.prompts import PROMPT_SETS, load_prompts
from dflash_ext.data.readers import expand
from dflash_ext.data.rows import SkipRow
from dflash_ext.data.store_files import is_store
from dflash_ext.errors import UserError

NO_ANSWER = "endpoint did not answer"
Progress = Callable[[int, int, str], None]
"""Called with conversations done, all of them, and a note."""


@dataclass
class Report:
    """What became of every row: rows == answered + sum(skipped.values())."""

    rows: int = 0
    answered: int = 0
    answers: int = 0
    """More than `answered` where a conversation has several turns."""
    unfinished: int = 0
    """Answers that max_tokens cut."""
    tokens: int = 0
    """Generated, as far as is known."""
    skipped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def skip(self, where: str, reason: str, detail: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        self.examples.setdefault(reason, f"{where} {detail}".rstrip())

    def __str__(self) -> str:
        lines = [
            f"{self.rows} rows: {self.answered} answered ({self.answers} answers, "
            f"{self.unfinished} of them cut, {self.tokens} tokens)"
        ]
        lines += [
            f"  {count} skipped: {reason} (first: {self.examples[reason]})"
            for reason, count in sorted(self.skipped.items(), key=lambda item: -item[1])
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Item:
    """One row to be answered."""

    where: str
    key: str
    """Of its content, and of how many like it came before: equal in every run."""
    prompt: Conversation | list[int] | SkipRow
    """Turns, the token ids of a store's prompt, or why it cannot be asked."""


def read_items(sources: Sequence[str], limit: int | None) -> Iterator[Item]:
    """Every row of the sources, in order. Reading anew gives the same items."""
    seen: Counter[str] = Counter()
    count = 0
    for where, prompt in _read(sources):
        if limit is not None and count >= limit:
            return
        count += not isinstance(prompt, SkipRow)
        if isinstance(prompt, SkipRow):
            yield Item(where, "", prompt)
            continue
        content: Any = prompt
        if isinstance(prompt, Conversation):
            content = [prompt.messages, prompt.tools]
        key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
        seen[key] += 1
        yield Item(where, f"{key}-{seen[key]}", prompt)


def _read(sources: Sequence[str]) -> Iterator[tuple[str, Conversation | list[int] | SkipRow]]:
    for name in sources:
        path = Path(name)
        if is_store(path):
            yield from _store_prompts(path)
        elif name in PROMPT_SETS or path.suffix == ".txt":
            for number, messages in enumerate(load_prompts(name), 1):
                yield f"{name} {number}", parse_prompt({"messages": messages})
        else:
            for source in expand([name]):
                for block in source.read():
                    for number, row in block.rows:
                        yield f"{block.source} row {number}", _parsed(row)


def _store_prompts(path: Path) -> Iterator[tuple[str, list[int] | SkipRow]]:
    from dflash_ext.data.store import TokenStore  # with torch, which a server's client is without

    store = TokenStore.open(path)
    for i in range(len(store)):
        prompt = store.prompt(i) or SkipRow("sample has no prompt")
        yield f"{path} sample {i}", prompt


def _parsed(row: bytes | SkipRow) -> Conversation | SkipRow:
    if isinstance(row, SkipRow):
        return row
    try:
        return parse_prompt(parse_json(row))
    except SkipRow as skip:
        return skip


def counted(journal: Journal, total: int, told: Progress) -> Callable[[int], None]:
    """Progress out of what the journal holds."""
    tokens = 0

    def tell(more: int) -> None:
        nonlocal tokens
        tokens += more
        told(len(journal), total, f"{tokens} tokens")

    return tell


def write_rows(
    out: Path,
    items: Iterator[Item],
    journal: Journal,
    missing: dict[str, str],
    rows_of: Callable[[Item, dict[str, Any]], list[dict[str, Any]]],
) -> Report:
    """The journal in the order of the prompts. UserError, and no file, if nothing was answered."""
    report = Report()
    scratch = out.with_name(f".{out.name}.tmp")
    with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        for item in items:
            report.rows += 1
            if isinstance(item.prompt, SkipRow):
                report.skip(item.where, item.prompt.reason, item.prompt.detail)
                continue
            if item.key not in journal:
                report.skip(item.where, NO_ANSWER, missing.get(item.key, ""))
                continue
            entry = journal[item.key]
            if not entry["answers"]:
                report.skip(item.where, "no answer could be had", entry["refusal"])
                continue
            report.answered += 1
            report.answers += len(entry["answers"])
            report.tokens += entry["tokens"]
            report.unfinished += entry.get("unfinished", 0) or sum(
                isinstance(answer, dict) and bool(answer.get("unfinished"))
                for answer in entry["answers"]
            )
            for row in rows_of(item, entry):
                file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())
    if not report.answered:
        scratch.unlink()
        reasons = "; ".join(
            f"{n} {reason} ({report.examples[reason]})" for reason, n in report.skipped.items()
        )
        raise UserError(f"0 of {report.rows} rows answered" + (f": {reasons}" if reasons else ""))
    os.replace(scratch, out)
    return report


def derived_seed(*parts: object) -> int:
    """31 bits that depend on all parts and on nothing else."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1
