"""What decoding says of a run's drafter: before, while and after it trains.

The same prompts and the same greedy decoding every time, so that numbers compare. Before and after,
the target decodes in fp32, in which every way of decoding gives the same tokens; in between, the
target that makes the features does.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from dflash_ext.best import load_best, read_record
from dflash_ext.checkpoint import Progress
from dflash_ext.comparison import Comparison, DecodeOptions, Prompts, decoded_lengths
from dflash_ext.config import TrainConfig, to_json
from dflash_ext.drafter import Drafter
from dflash_ext.export import save_export
from dflash_ext.monitor import Monitor
from dflash_ext.record import save
from dflash_ext.run import BEST_FOLDER
from dflash_ext.samples import Samples
from dflash_ext.target import Target


def comparison_of(
    config: TrainConfig, prompts: Prompts, held_out: Samples, folder: Path | None = None
) -> Comparison | None:
    """Of the sets in the options, and of held-out conversations on top; None if there are none."""
    some = held_out.indices[: config.eval.prompts_per_set].tolist()
    if config.eval.held_out_prompts and some:
        prompts = prompts | {"held-out": [held_out.store.prompt(i) for i in some]}
    options = DecodeOptions(config.eval.max_new_tokens, config.eval.batch)
    return Comparison(prompts, options, folder) if prompts else None


class Judge:
    """Rank 0's."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        monitor: Monitor,
        prompts: Prompts,
        held_out: Samples,
    ) -> None:
        self.config, self.folder, self.monitor = config, folder, monitor
        self.comparison = comparison_of(config, prompts, held_out, folder)

    def before(self, target: Target, drafter: Drafter) -> None:
        """Decode by plain decoding, prompt lookup and the untrained drafter."""
        assert self.comparison is not None
        with self.monitor.stage("evaluate before") as stage:
            self.comparison.baselines(target, drafter.config.block_size, stage.update)
            self.comparison.drafter("before", target, drafter, stage.update)

    def during(self, step: int, target: Target, drafter: Drafter) -> float:
        """The accepted length after `step`, logged for every set and returned for all of them."""
        assert self.comparison is not None
        self.comparison.drafter("during", target, drafter)
        found = decoded_lengths(self.comparison, "during", drafter.config.block_size)
        self.monitor.log("decoded", step, found)
        return found["accept_len"]

    def export(self, target: Target, drafter: Drafter, step: int) -> None:
        """Export the last drafter to export/, and the best one to best/export."""
        export = save_export(drafter, self.folder / "export", target=target)
        self.monitor.say(f"exported to {export}: reloaded, and equal to an independent forward")
        record = read_record(self.folder)
        if record is None:
            return
        best = self.folder / BEST_FOLDER / "export"
        if record.step == step:
            shutil.copytree(export, best, dirs_exist_ok=True)
        else:
            save_export(load_best(self.folder, drafter.config), best, target=target)
        self.monitor.say(
            f"best accepted length {record.accept_len:.2f} ({record.measure}) after step "
            f"{record.step}: exported to {best}"
        )

    def after(self, target: Target, drafter: Drafter, progress: Progress) -> None:
        """Decode with the trained drafter; show and save the table."""
        if self.comparison is None:
            return
        B = drafter.config.block_size
        with self.monitor.stage("evaluate after") as stage:
            # Kept from before, unless prompts changed.
            self.comparison.baselines(target, B, stage.update)
            self.comparison.drafter("after", target, drafter, stage.update)
        rows = self.comparison.rows(B)
        cells = [[v if isinstance(v, str) else f"{v:.2f}" for v in r.values()] for r in rows]
        self.monitor.table("Accepted length (tokens per target step)", list(rows[0]), cells)
        seconds = round(progress.seconds)  # of training alone
        result = {"benchmark": "train", "train_seconds": seconds, "steps": progress.position}
        options = json.loads(to_json(self.config))
        save(self.folder / "results.json", {**result, "options": options, "rows": rows})
