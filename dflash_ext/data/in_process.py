"""Regeneration by a target in this process: exact ids, as the model read and wrote them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dflash_ext.data.answers import Sampling, answer
from dflash_ext.data.dialogue import next_prompt
from dflash_ext.data.formats import Conversation, Message
from dflash_ext.data.journal import Journal
from dflash_ext.data.regeneration import (
    Item,
    Progress,
    Report,
    counted,
    derived_seed,
    write_rows,
)
from dflash_ext.data.rows import ChatOptions, SkipRow
from dflash_ext.data.templates import Renderer
from dflash_ext.run import resolve_device
from dflash_ext.target import Target

if TYPE_CHECKING:
    from dflash_ext.regenerate import Options

# Conversations of a chunk are sorted by length into batches: more of them, less spread in each.
_BATCHES_OF_A_CHUNK = 8


@dataclass
class _Dialogue:
    """One conversation in progress."""

    item: Item
    answers: list[Message] = field(default_factory=list)
    pieces: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """(prompt's ids, answer's ids) of each turn."""
    refusal: str = ""


class InProcess:
    """A loaded target that answers."""

    def __init__(self, target: Target, options: Options) -> None:
        self.target, self.options = target, options
        self._stops = sorted(target.stop_ids)
        self._longest = int(getattr(target.model.config, "max_position_embeddings", 0) or 1 << 30)
        self._sampling = Sampling(options.temperature, options.top_p, options.max_tokens)
        chat = ChatOptions(template_kwargs=options.template_kwargs)
        self._render: Renderer | None = None
        if getattr(target.tokenizer, "chat_template", None):
            self._render = Renderer(
                target.tokenizer, date=chat.date, arguments=chat.template_arguments()
            )

    def chunk(self, items: list[Item], number: int) -> list[_Dialogue]:
        """Answer every turn of the items. Deterministic in the items, their order and `number`."""
        device = self.target.model.device
        generator = torch.Generator(device=device)
        # One stream for each chunk: it does not matter which chunks an earlier run has done.
        generator.manual_seed(derived_seed(self.options.seed, number))
        dialogues = [_Dialogue(item) for item in items]
        waiting = self._prompts(dialogues)
        while waiting:
            waiting.sort(key=lambda pair: len(pair[1]))  # stable: ties stay in order
            size = self.options.batch_size
            for start in range(0, len(waiting), size):
                batch = waiting[start : start + size]
                found = answer(
                    self.target.model,
                    [ids for _, ids in batch],
                    stops=self._stops,
                    sampling=self._sampling,
                    generator=generator,
                )
                for (dialogue, ids), answered in zip(batch, found):
                    dialogue.pieces.append((ids, answered))
                    dialogue.answers.append(self._message(answered))
            waiting = self._prompts(dialogues)
        return dialogues

    def _prompts(self, dialogues: list[_Dialogue]) -> list[tuple[_Dialogue, list[int]]]:
        """The next prompts of the dialogues that go on."""
        out = []
        for dialogue in dialogues:
            if dialogue.refusal:
                continue
            try:
                ids = self._prompt(dialogue)
            except SkipRow as skip:
                dialogue.refusal = str(skip)
                continue
            if ids is None:
                continue
            if len(ids) + self.options.max_tokens > self._longest:
                dialogue.refusal = (
                    f"prompt of {len(ids)} tokens and {self.options.max_tokens} of its answer "
                    f"exceed the target's {self._longest} positions"
                )
                continue
            out.append((dialogue, ids))
        return out

    def _prompt(self, dialogue: _Dialogue) -> list[int] | None:
        given = dialogue.item.prompt
        if isinstance(given, list):
            return given if not dialogue.answers else None
        assert isinstance(given, Conversation)
        if given.tools and dialogue.answers:
            return None  # its answer may call a tool that nobody here can run
        messages = next_prompt(given, dialogue.answers)
        if messages is None:
            return None
        if self._render is None:
            raise SkipRow("the target has no chat template")
        text = self._render(messages, generation=True, tools=given.tools)
        ids: list[int] = self.target.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _message(self, answered: list[int]) -> Message:
        finished = bool(answered) and answered[-1] in self._stops
        text = self.target.tokenizer.decode(
            answered[:-1] if finished else answered, skip_special_tokens=False
        )
        cut = {} if finished else {"unfinished": True}
        return {"role": "assistant", "content": text, **cut}


def samples_of(pieces: list[tuple[list[int], list[int]]]) -> list[tuple[list[int], list[int]]]:
    """(ids, mask of 0 and 1) of a dialogue: one sample while each prompt extends what is there."""
    samples: list[tuple[list[int], list[int]]] = []
    for prompt, answered in pieces:
        if samples and prompt[: len(samples[-1][0])] == samples[-1][0]:
            ids, mask = samples[-1]
        else:
            ids, mask = [], []
            samples.append((ids, mask))
        mask += [0] * (len(prompt) - len(ids)) + [1] * len(answered)
        ids += prompt[len(ids) :] + answered
    return samples


def by_target(
    options: Options,
    items: Callable[[], Iterator[Item]],
    partial: Path,
    total: int,
    told: Progress,
) -> Report:
    """`regenerate` with a target that is loaded here."""
    assert options.target is not None
    target = Target.load(
        options.target,
        device=resolve_device(options.device),
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
        accelerated=False,
    )
    answerer = InProcess(target, options)
    sampling = {
        **options.sampling(options.target),
        "dtype": options.dtype,
        "device": target.device.type,
        "batch_size": options.batch_size,
    }
    journal = Journal(partial, sampling)
    keep = True
    try:
        tell = counted(journal, total, told)
        good = (item for item in items() if not isinstance(item.prompt, SkipRow))
        size = options.batch_size * _BATCHES_OF_A_CHUNK
        number = 0
        while chunk := list(islice(good, size)):
            if not all(item.key in journal for item in chunk):
                for dialogue in answerer.chunk(chunk, number):
                    if dialogue.item.key not in journal:
                        tokens = sum(len(answered) for _, answered in dialogue.pieces)
                        journal.add(
                            dialogue.item.key,
                            answers=dialogue.pieces,
                            tokens=tokens,
                            unfinished=sum(bool(m.get("unfinished")) for m in dialogue.answers),
                            refusal=dialogue.refusal,
                        )
                        tell(tokens)
            number += 1

        def rows_of(_: Item, entry: dict[str, Any]) -> list[dict[str, Any]]:
            return [
                {"ids": ids, "mask": mask, "sampling": sampling}
                for ids, mask in samples_of(entry["answers"])
            ]

        report = write_rows(options.out, items(), journal, {}, rows_of)
        keep = False
    finally:
        journal.close(remove=not keep)
    return report
