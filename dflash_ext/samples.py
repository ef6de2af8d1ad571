"""The samples a run trains on and those it holds out: from the user's data, or the target's own."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dflash_ext.config import TrainConfig
from dflash_ext.data.prepared import finished_store, prepared_store
from dflash_ext.data.store import TokenStore, split_indices
from dflash_ext.data.store_files import is_store
from dflash_ext.data.synthesis import synthesized_store
from dflash_ext.data.templates import load_tokenizer
from dflash_ext.errors import UserError
from dflash_ext.monitor import Monitor
from dflash_ext.plan import Schedule
from dflash_ext.target import Target


@dataclass(frozen=True)
class Samples:
    """Some samples of a token store."""

    store: TokenStore
    indices: np.ndarray
    """int64 [n]."""


def prepare_files(config: TrainConfig, path: str, monitor: Monitor) -> tuple[Samples, Samples]:
    """Training and held-out samples from sources of rows or finished stores.

    UserError if no row can be trained, or a store was not made for this target.
    """
    options = config.data

    @functools.cache
    def tokenizer() -> Any:
        return load_tokenizer(path, trust_remote_code=config.target.trust_remote_code)

    def prepare(source: str, name: str) -> TokenStore:
        if is_store(source):
            checked = None if config.target.random_weights else tokenizer
            store = finished_store(source, checked, max_length=options.max_length)
            monitor.say(f"{source}: {len(store)} samples, {store.lengths.sum()} tokens")
            return store
        store, report = prepared_store(source, tokenizer(), max_length=options.max_length)
        monitor.say(f"{source}: {report}")
        if monitor.folder is not None:
            record = json.dumps(dataclasses.asdict(report), indent=2) + "\n"
            (monitor.folder / f"prepared-{name}.json").write_text(record)
        return store

    assert options.train is not None
    store = prepare(options.train, "train")
    if options.validation is None:
        return split(store, options.held_out, config.seed)
    train_set, held_out = apart(store, prepare(options.validation, "validation"))
    if shared := len(store) - len(train_set.indices):
        monitor.say(
            f"{shared} samples of {options.train} are of rows that {options.validation} holds as "
            "well: they are not trained on"
        )
    if len(train_set.indices) == 0:
        raise UserError(
            f"every row of {options.train} is in {options.validation} as well, which leaves "
            "nothing to train on: name other data for validation, or none at all"
        )
    return train_set, held_out


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


def split(
    store: TokenStore, held_out: int, seed: int, *, begun: int | None = None
) -> tuple[Samples, Samples]:
    """Training samples and those of `held_out` rows; UserError if there are not that many.

    begun: how many samples the store had when the run began (None: as many as now). What is held
    out was chosen then; later rows are trained on, except copies of held-out ones. So training
    samples keep their places among the training samples, and new ones follow.
    """
    _, held = split_indices(store.keys[:begun], held_out, seed=seed)
    is_held = np.isin(store.keys, store.keys[held])
    return Samples(store, np.flatnonzero(~is_held)), Samples(store, held)


def apart(store: TokenStore, held: TokenStore) -> tuple[Samples, Samples]:
    """Training samples, and held-out ones of another store: no row of theirs is trained on.

    Which rows are the same is told by their tokens and masks. Samples that follow when `store`
    grows come behind those there are, as in `split`.
    """
    is_held = np.isin(store.keys, held.keys)
    return Samples(store, np.flatnonzero(~is_held)), Samples(held, np.arange(len(held)))


def as_begun(
    config: TrainConfig, data: tuple[Samples, Samples], states: Sequence[str], held_out: str
) -> tuple[Samples, Samples]:
    """Training and held-out samples of a run whose stores grew since it began.

    data: what the stores hold now. states: identities of the training data, from the first to the
    last to use. held_out: identity of the held-out data. UserError if a store never was that.
    """
    train_set, other = data
    store = train_set.store.as_of(states[-1])
    if other.store is train_set.store:
        return split(store, config.data.held_out, config.seed, begun=store.prefix(states[0]))
    return apart(store, other.store.as_of(held_out))


def schedule_of(
    config: TrainConfig, samples: Samples, states: Sequence[tuple[int, str]] = ()
) -> Schedule:
    """The plan of all epochs. UserError if a sample does not fit the budgets.

    states: (first epoch, identity of the data from then on); none: all samples in every epoch.
    """
    options, store = config.batch, samples.store
    counts = [(e, int(np.searchsorted(samples.indices, store.prefix(i) or 0))) for e, i in states]
    return Schedule(
        store.lengths[samples.indices],
        np.minimum(store.candidates[samples.indices], options.anchors_per_sequence),
        seed=config.seed,
        token_budget=options.token_budget,
        max_documents=options.max_documents,
        anchor_budget=options.anchor_budget,
        states=counts or None,
    )
