"""The same prompts decoded in several ways: what training's end table and `evaluate` share.

Plain decoding and prompt lookup do not change with training, so a run decodes them once, before
it; all generations are kept in the run folder, where a resumed run finds them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_ext.acceptance import MethodReport, summarise
from dflash_ext.data.prompts import load_prompts
from dflash_ext.data.rows import SkipRow
from dflash_ext.data.templates import render
from dflash_ext.drafter import Drafter
from dflash_ext.errors import UserError
from dflash_ext.generate import Generation, decode
from dflash_ext.proposers import DrafterProposer, Nobody, PromptLookup, Proposer
from dflash_ext.sampling import GREEDY, Sampling
from dflash_ext.target import Target

Progressed = Callable[[int, int], None]
"""Called with (decodings done, decodings in all)."""
Generations = dict[str, list[Generation]]
"""Prompt set -> one generation per prompt."""
Prompts = dict[str, list[list[int]]]
"""Prompt set (or file, as it was named) -> token ids of its prompts."""


@dataclass(frozen=True)
class DecodeOptions:
    """How every prompt is decoded, whoever proposes."""

    max_new_tokens: int
    batch: int = 1
    """Prompts decoded side by side."""
    sampling: Sampling = GREEDY


def encode_prompt(target: Target, messages: Sequence[dict[str, Any]]) -> list[int]:
    """Ids of a conversation through the target's chat template, ready for its answer.

    UserError if the target has no template, or its template refuses the conversation.
    """
    tokenizer = target.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"tokenizer of {target.path!r} has no chat template: use an instruction-tuned target"
        )
    try:
        text = render(tokenizer, list(messages), generation=True)
    except SkipRow as error:
        raise UserError(
            f"prompt {messages[-1]['content'][:60]!r} of roles "
            f"{', '.join(m['role'] for m in messages)}: {error} (target {target.path!r})"
        ) from None
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def encoded_prompts(target: Target, names: Sequence[str], limit: int | None) -> Prompts:
    """The prompts of every set, at most `limit` of each."""
    return {name: [encode_prompt(target, p) for p in load_prompts(name, limit)] for name in names}


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Name -> what a table shows: a file without its folder, unless two would read the same."""
    short = [Path(name).name for name in names]
    return {n: s if short.count(s) == 1 else n for n, s in zip(names, short)}


def tree_name(guesses: int) -> str:
    return f"tree@{guesses}"


class Comparison:
    """Prompts, and what every method made of them.

    A method is named "plain", "lookup", "chain" or "tree@N"; training keeps its chains as "before"
    and "after".
    """

    def __init__(
        self, prompts: Prompts, options: DecodeOptions, folder: Path | None = None
    ) -> None:
        """folder: where generations are kept, and found again if they are of the same decoding."""
        self.prompts, self.options = prompts, options
        self.file = None if folder is None else folder / "generations.json"
        self.results: dict[str, Generations] = {}
        if self.file is not None and self.file.exists():
            kept = json.loads(self.file.read_text())
            if all(kept.get(key) == value for key, value in self._identity().items()):
                self.results = {
                    method: {name: [Generation(**g) for g in found] for name, found in sets.items()}
                    for method, sets in kept["results"].items()
                }

    def _identity(self) -> dict[str, Any]:
        """What the generations depend on; not on how many are decoded side by side."""
        sampling = dataclasses.asdict(self.options.sampling)
        new_tokens = self.options.max_new_tokens
        return {"prompts": self.prompts, "max_new_tokens": new_tokens, "sampling": sampling}

    def run(
        self,
        method: str,
        target: Target,
        proposer: Proposer,
        progress: Progressed = lambda done, total: None,
    ) -> None:
        """Decode everything with a proposer and keep it as `method`."""
        done, total = 0, sum(map(len, self.prompts.values()))

        def finished() -> None:
            nonlocal done
            done += 1
            progress(done, total)

        self.results[method] = {
            name: decode(
                target,
                proposer,
                prompts,
                self.options.max_new_tokens,
                target.stop_ids,
                sampling=self.options.sampling,
                batch=self.options.batch,
                finished=finished,
            )
            for name, prompts in self.prompts.items()
        }
        if self.file is not None:
            plain = {
                method: {
                    name: [dataclasses.asdict(g) for g in found] for name, found in sets.items()
                }
                for method, sets in self.results.items()
            }
            self.file.write_text(json.dumps(self._identity() | {"results": plain}) + "\n")

    def baselines(self, target: Target, block_size: int, progress: Progressed) -> None:
        """Plain decoding and prompt lookup, unless they are there already."""
        if "plain" not in self.results:
            self.run("plain", target, Nobody(), progress)
        if "lookup" not in self.results:
            self.run("lookup", target, PromptLookup(block_size, target.device), progress)

    def drafter(
        self,
        method: str,
        target: Target,
        drafter: Drafter,
        progress: Progressed = lambda done, total: None,
        *,
        tree: int | None = None,
        record: bool = False,
    ) -> None:
        """Speculative decoding by chains, or trees of `tree` guesses, kept as `method`."""
        sampling = self.options.sampling
        proposer = DrafterProposer(target, drafter, tree=tree, sampling=sampling, record=record)
        self.run(method, target, proposer, progress)

    def report(self, method: str, name: str, block_size: int) -> MethodReport:
        """Counts of one method on one prompt set."""
        reference = self.results.get("plain", {}).get(name)
        depth = 1 if method == "plain" else block_size
        return summarise(self.results[method][name], depth, reference)

    def accept_len(self, method: str) -> float:
        """Mean tokens a step yields, over all sets."""
        found = self.results[method].values()
        lengths = [n for generations in found for g in generations for n in g.accepted]
        return sum(lengths) / len(lengths) if lengths else 1.0

    def rows(self, block_size: int) -> list[dict[str, float | str]]:
        """Training's table, a row per set: accepted lengths, and how many equal plain decoding."""
        table: list[dict[str, float | str]] = []
        for name, shown in short_names(list(self.prompts)).items():
            after = self.report("after", name, block_size)
            known = "before" in self.results  # not if a resumed run was given other prompts
            before = self.report("before", name, block_size).accept_len if known else "–"
            table.append(
                {
                    "prompts": shown,
                    "before": before,
                    "after": after.accept_len,
                    "prompt lookup": self.report("lookup", name, block_size).accept_len,
                    "equals greedy": f"{after.identical}/{after.prompts}",
                }
            )
        return table


def decoded_lengths(comparison: Comparison, method: str, block_size: int) -> dict[str, float]:
    """For a log: the accepted length of all sets together, and of each."""
    found = {"accept_len": comparison.accept_len(method)}
    for name, short in short_names(list(comparison.prompts)).items():
        found[f"accept_len/{short}"] = comparison.report(method, name, block_size).accept_len
    return found
