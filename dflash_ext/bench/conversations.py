"""Synthetic conversations of a real corpus's size, from text that every Python brings along."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

CHARACTERS = {"user": 500, "assistant": 2700}
"""Mean size of a turn; about 4.4 characters are a token of SmolLM2."""
TURNS = (1, 2, 2, 3)


def conversations(count: int, *, seed: int = 0) -> Iterator[str]:
    """`count` distinct JSON rows with `messages`, about 1,500 tokens each, sizes lognormal.

    Windows of the language reference (prose, code, tables), a few thousand words of vocabulary: as
    hard for a tokenizer's word cache as English chat with code in it.
    """
    from pydoc_data.topics import topics

    text = " ".join(topics.values())
    draw = random.Random(seed)
    for number in range(count):
        messages = []
        for _ in range(draw.choice(TURNS)):
            for role, mean in CHARACTERS.items():
                size = int(mean * 0.78 * draw.lognormvariate(0, 0.7)) + 8
                start = draw.randrange(len(text) - size)
                messages.append(
                    {"role": role, "content": text[start : start + size].strip() or "-"}
                )
        yield json.dumps({"id": number, "messages": messages}, ensure_ascii=False)


def write_conversations(path: Path, count: int, *, seed: int = 0) -> None:
    """`conversations` as JSON lines."""
    with open(path, "w", encoding="utf-8") as file:
        for row in conversations(count, seed=seed):
            file.write(row + "\n")
