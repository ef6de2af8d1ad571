"""The samples a run trains on and those it holds out: from chat files, or the target's own."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_ext.config import TrainConfig
from dflash_ext.data.prepared import prepared_store
from dflash_ext.data.store import TokenStore, split_indices
from dflash_ext.data.synthesis import synthesized_store
from dflash_ext.errors import UserError
from dflash_ext.monitor import Monitor
from dflash_ext.target import Target


@dataclass(frozen=True)
class Samples:
    """Some samples of a token store."""

    store: TokenStore
    indices: np.ndarray
    """int64 [n]."""


def prepare_files(config: TrainConfig, path: str, monitor: Monitor) -> tuple[Samples, Samples]:
    """Training and held-out samples from chat files or finished stores.

    UserError if no row can be trained.
    """
    options = config.data

    def prepare(file: str, name: str) -> TokenStore:
        if Path(file).is_dir():
            store = TokenStore.open(file)
            monitor.say(f"{file}: {len(store)} samples, {store.lengths.sum()} tokens")
            return store
        tokenizer = _tokenizer(config, path)
        store, report = prepared_store(file, tokenizer, max_length=options.max_length)
        monitor.say(f"{file}: {report}")
        if monitor.folder is not None:
            record = json.dumps(dataclasses.asdict(report), indent=2) + "\n"
            (monitor.folder / f"prepared-{name}.json").write_text(record)
        return store

    assert options.train is not None
    store = prepare(options.train, "train")
    if options.validation is None:
        return split(store, options.held_out, config.seed)
    other = prepare(options.validation, "validation")
    return Samples(store, np.arange(len(store))), Samples(other, np.arange(len(other)))


def _tokenizer(config: TrainConfig, path: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            path, trust_remote_code=config.target.trust_remote_code
        )
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"tokenizer of {path!r} cannot be loaded: {reason}") from error


def synthesise(config: TrainConfig, target: Target, monitor: Monitor) -> tuple[Samples, Samples]:
    """Training and held-out samples that the target wrote itself; cached between runs."""
    options = config.data
    with monitor.stage("synthesise data") as stage:
        try:
            store = synthesized_store(
                target.model,
                target.tokenizer,
                count=options.synthetic_rows,
                max_prompt_tokens=options.max_prompt_tokens,
                max_answer_tokens=options.max_answer_tokens,
                batch_size=options.synthesis_batch,
                seed=config.seed,
                progress=stage.update,
            )
        except torch.OutOfMemoryError:
            raise UserError(
                f"{options.synthesis_batch} conversations side by side do not fit on "
                f"{target.device}: lower --data.synthesis-batch"
            ) from None
    monitor.say(f"{len(store)} conversations of the target's own, {store.lengths.sum()} tokens")
    return split(store, options.held_out, config.seed)


def split(store: TokenStore, held_out: int, seed: int) -> tuple[Samples, Samples]:
    train_indices, held_out_indices = split_indices(store.keys, held_out, seed=seed)
    return Samples(store, train_indices), Samples(store, held_out_indices)
