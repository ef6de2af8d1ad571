"""The end table's numbers: the same prompts decoded before and after training, beside baselines.

Greedy decoding and prompt lookup do not change with training, so they run once, before it; all
generations are kept in the run folder, where a resumed run finds them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from dflash_ext.config import EvalOptions
from dflash_ext.data.prompts import load_prompts
from dflash_ext.drafter import Drafter
from dflash_ext.evaluate import MethodReport, encode_prompt, summarise
from dflash_ext.generate import Generation, plain_decode, prompt_lookup_decode, speculative_decode
from dflash_ext.target import Target

Progressed = Callable[[int, int], None]
Generations = dict[str, list[Generation]]
"""Prompt set -> one generation per prompt."""


def encoded_prompts(target: Target, options: EvalOptions) -> dict[str, list[list[int]]]:
    """Prompt set (or file, as it was named) -> token ids of its prompts."""
    if not options.prompts_per_set:
        return {}
    return {
        name: [encode_prompt(target, p) for p in load_prompts(name, options.prompts_per_set)]
        for name in options.prompts
    }


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Name -> what a table shows: a file without its folder, unless two would read the same."""
    short = [Path(name).name for name in names]
    return {n: s if short.count(s) == 1 else n for n, s in zip(names, short)}


class Comparison:
    """One run's prompts and what every method made of them."""

    def __init__(
        self, folder: Path, prompts: dict[str, list[list[int]]], max_new_tokens: int
    ) -> None:
        self.file = folder / "generations.json"
        self.prompts, self.max_new_tokens = prompts, max_new_tokens
        self.results: dict[str, Generations] = {}
        """Method (greedy, lookup, before, after) -> generations."""
        kept = json.loads(self.file.read_text()) if self.file.exists() else {}
        if kept.get("prompts") == prompts and kept["max_new_tokens"] == max_new_tokens:
            self.results = {
                method: {name: [Generation(**g) for g in found] for name, found in sets.items()}
                for method, sets in kept["results"].items()
            }

    def _decode(
        self, method: str, decode: Callable[[list[int]], Generation], progress: Progressed
    ) -> None:
        done, total = 0, sum(map(len, self.prompts.values()))
        result: Generations = {}
        for name, prompts in self.prompts.items():
            result[name] = []
            for ids in prompts:
                result[name].append(decode(ids))
                done += 1
                progress(done, total)
        self.results[method] = result
        plain = {
            method: {name: [dataclasses.asdict(g) for g in found] for name, found in sets.items()}
            for method, sets in self.results.items()
        }
        content = {"prompts": self.prompts, "max_new_tokens": self.max_new_tokens}
        self.file.write_text(json.dumps(content | {"results": plain}) + "\n")

    def baselines(self, target: Target, block_size: int, progress: Progressed) -> None:
        """Greedy and prompt-lookup generations, unless an interrupted run made them."""
        n, stop = self.max_new_tokens, target.stop_ids
        if "greedy" not in self.results:
            self._decode("greedy", lambda ids: plain_decode(target, ids, n, stop), progress)
        if "lookup" not in self.results:
            self._decode(
                "lookup",
                lambda ids: prompt_lookup_decode(target, ids, n, stop, block_size=block_size),
                progress,
            )

    def drafter(self, method: str, target: Target, drafter: Drafter, progress: Progressed) -> None:
        """Speculative generations, kept as `method` ("before" or "after")."""
        n, stop = self.max_new_tokens, target.stop_ids
        self._decode(
            method, lambda ids: speculative_decode(target, drafter, ids, n, stop), progress
        )

    def report(self, method: str, name: str, block_size: int) -> MethodReport:
        """Counts of one method on one prompt set."""
        return summarise(
            self.results[method][name], block_size, self.results.get("greedy", {}).get(name)
        )

    def rows(self, block_size: int) -> list[dict[str, float | str]]:
        """One row per prompt set: accepted lengths, and how many outputs equal greedy's."""
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
                    "equals greedy": f"{after.identical_to_greedy}/{after.prompts}",
                }
            )
        return table
