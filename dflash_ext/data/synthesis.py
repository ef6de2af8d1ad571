"""The target's own conversations: it writes a user's turn, then answers it greedily.

A drafter is trained on what its target would write, so no data set is needed. All rows of a batch
start from the template's text before a user's turn and gain one token per step, hence they always
have the same length: no padding, no attention mask, one position for all rows. Ids are kept as
the model produced them; nothing is tokenised again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_ext.data import decoding, store, store_files
from dflash_ext.data.decoding import (
    CHECK_EVERY,
    DROP_SHARE,
    forward,
    sample_top_p,
    start_cache,
    up_to_stop,
)
from dflash_ext.data.encode import identity
from dflash_ext.data.rows import ChatOptions, SkipRow
from dflash_ext.data.store import StoreWriter, TokenStore, cached_store
from dflash_ext.data.store_files import cache_key, code_version
from dflash_ext.data.templates import SENTINEL, check_tokenizer, end_of_turn, render
from dflash_ext.errors import UserError
from dflash_ext.transformers_api import can_drop_rows, model_description

TOP_P = 0.95
_MIN_YIELD = 0.02  # usable share of the prompts below which the target is called unfit
_FIRST_YIELD = 0.8  # expected before any was seen

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Frame:
    """The template's own tokens around a user's turn and an answer."""

    prefix: list[int]
    """Everything before the user's text."""
    user_end: int
    """The token that ends the user's turn."""
    suffix: list[int]
    """After `user_end` up to where the assistant's answer begins."""
    stops: list[int]
    """Tokens that end the answer."""
    special: frozenset[int]
    """Tokens that no user's text contains."""


def template_frame(model: Any, tokenizer: Any) -> Frame:
    """Take the chat template apart around a sentinel. UserError where it cannot be done."""
    check_tokenizer(tokenizer)
    try:
        return _frame(model, tokenizer)
    except SkipRow as error:
        raise UserError(f"cannot synthesise prompts: {error}") from None


def _frame(model: Any, tokenizer: Any) -> Frame:
    user = {"role": "user", "content": SENTINEL}
    text = render(tokenizer, [user], generation=True)
    before, found, after = text.partition(SENTINEL)
    answer = render(tokenizer, [user, {"role": "assistant", "content": SENTINEL}], generation=False)
    if not found or not before or not answer.startswith(before):
        raise UserError(
            "the chat template does not show a user's text after some of its own; cannot "
            "synthesise prompts"
        )

    def encode(piece: str) -> list[int]:
        return list(tokenizer(piece, add_special_tokens=False)["input_ids"])

    end = end_of_turn(tokenizer, after)
    ending = encode(after[:end])
    if len(ending) != 1:
        raise UserError(
            f"the chat template ends a user's turn with {after[:end]!r}, expected a single token; "
            "cannot synthesise prompts"
        )
    trailing = answer.rpartition(SENTINEL)[2]
    stops = {encode(trailing[: end_of_turn(tokenizer, trailing)])[-1]}
    configured = model.generation_config.eos_token_id
    stops |= set(configured if isinstance(configured, list) else [configured])
    return Frame(
        prefix=encode(before),
        user_end=ending[0],
        suffix=encode(after[end:]),
        stops=sorted(stop for stop in stops if stop is not None),
        special=frozenset(tokenizer.all_special_ids) | frozenset(tokenizer.added_tokens_decoder),
    )


def _lockstep(
    model: Any,
    frame: Frame,
    generator: torch.Generator,
    *,
    rows: int,
    max_prompt_tokens: int,
    max_answer_tokens: int,
) -> Iterator[tuple[int, list[int], list[int]]]:
    """(row, user's tokens, answer's tokens) of each row whose prompt ended and is not empty.

    A row first samples its user's turn, then is fed the frame's suffix, then answers. The step
    at which its turn ended is its whole state, kept on the device: no host sync per token.
    """
    device = model.device
    P, S = len(frame.prefix), len(frame.suffix)
    longest = max_prompt_tokens + 1 + S + max_answer_tokens
    prefix = torch.tensor([frame.prefix], device=device)
    logits, cache = start_cache(model, prefix, rows, P + longest)
    droppable = can_drop_rows(cache)
    forced = torch.tensor([*frame.suffix, 0], device=device)
    stops = torch.tensor(frame.stops, device=device)
    written = torch.zeros(rows, longest, dtype=torch.int64, device=device)
    # Step at which the user's turn ended, or `longest` as long as it has not.
    user_end = torch.full((rows,), longest, device=device)
    done = torch.zeros(rows, dtype=torch.bool, device=device)
    seen = torch.zeros(rows, dtype=torch.bool, device=device)  # handed over already
    index = torch.arange(rows, device=device)
    for step in range(longest):
        answer_step = step - user_end - 1 - S  # [rows], 0 = the answer's first token
        token = logits.argmax(-1)
        asking = (user_end == longest) & ~done
        if step <= max_prompt_tokens:
            token = _ask(logits, asking, token, generator)
        in_suffix = (user_end < step) & (answer_step < 0)
        token = torch.where(in_suffix, forced[(answer_step + S).clamp(0, S)], token)
        written[:, step] = token
        ended = asking & (token == frame.user_end)
        user_end = torch.where(ended, step, user_end)
        done |= (answer_step >= 0) & torch.isin(token, stops)
        done |= answer_step == max_answer_tokens - 1
        # Degenerate: an empty user's turn, or one that does not end.
        done |= (ended & (step == 0)) | (asking & ~ended & (step >= max_prompt_tokens))
        if (step + 1) % CHECK_EVERY == 0 or step == longest - 1:
            fresh = (done & ~seen).nonzero().flatten()
            for row, end, tokens in zip(
                index[fresh].tolist(), user_end[fresh].tolist(), written[fresh].tolist()
            ):
                if 0 < end < longest:
                    answer = tokens[end + 1 + S : step + 1][:max_answer_tokens]
                    yield row, tokens[:end], up_to_stop(answer, frame.stops)
            seen |= done
            left = (~done).nonzero().flatten()
            if left.numel() == 0:
                return
            if droppable and left.numel() <= (1 - DROP_SHARE) * done.numel():
                cache.batch_select_indices(left)
                written, index, user_end, token, done, seen = (
                    x[left] for x in (written, index, user_end, token, done, seen)
                )
        logits = forward(model, token[:, None], cache)


def _ask(logits: Tensor, asking: Tensor, token: Tensor, generator: torch.Generator) -> Tensor:
    """`token` [rows] with the rows that are `asking` sampled."""
    if logits.device.type != "cpu":
        # Sampling for all rows costs a GPU less than finding out which ones need it.
        return torch.where(asking, sample_top_p(logits, generator, TOP_P), token)
    rows = asking.nonzero().flatten()
    return token.index_copy(0, rows, sample_top_p(logits[rows], generator, TOP_P))


@torch.inference_mode()
def synthesize(
    model: Any,
    tokenizer: Any,
    *,
    count: int,
    max_prompt_tokens: int = 64,
    max_answer_tokens: int = 256,
    batch_size: int = 64,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[tuple[list[int], list[bool]]]:
    """`count` conversations as (ids, mask): prompt unsupervised, the greedy answer supervised.

    An answer cut at `max_answer_tokens` has no end token. Prompts are distinct and tokenise to
    the ids they were sampled as. Deterministic for one device, batch size and seed.
    `progress(conversations done, count)`. Raises UserError if the model hardly writes any prompt.
    """
    limits = {"max_prompt_tokens": max_prompt_tokens, "max_answer_tokens": max_answer_tokens}
    for name, value in {"count": count, "batch_size": batch_size, **limits}.items():
        if value < 1:
            raise UserError(f"{name} {value}: expected at least 1")
    frame = template_frame(model, tokenizer)
    generator = torch.Generator(device=model.device).manual_seed(seed)
    kept: list[tuple[list[int], list[bool]]] = []
    asked: set[tuple[int, ...]] = set()
    tried = 0
    was_training = model.training
    model.eval()
    try:
        while len(kept) < count:
            batch = []
            missing = count - len(kept)
            # The last batch should be the last: a straggling one of a few rows takes as many
            # decode steps as a full one, so it starts as many rows as lately were needed for that.
            share = max(len(kept) / tried, _MIN_YIELD) if tried else _FIRST_YIELD
            rows = min(batch_size, math.ceil(1.1 * missing / share) + 4)
            for item in _lockstep(
                model,
                frame,
                generator,
                rows=rows,
                max_prompt_tokens=max_prompt_tokens,
                max_answer_tokens=max_answer_tokens,
            ):
                if _is_prompt(tokenizer, frame, item[1]) and tuple(item[1]) not in asked:
                    asked.add(tuple(item[1]))
                    batch.append(item)
                    if progress:
                        progress(min(len(kept) + len(batch), count), count)
            # In row order, not in the order of finishing: the cut below must not prefer short ones.
            kept += [_sample(frame, user, answer) for _, user, answer in sorted(batch)]
            tried += rows
            if tried >= 4 * batch_size and len(kept) < _MIN_YIELD * tried:
                raise UserError(
                    f"only {len(kept)} of {tried} prompts the target wrote were usable (distinct, "
                    f"ended in {max_prompt_tokens} tokens); raise max_prompt_tokens or give data"
                )
    finally:
        model.train(was_training)
    return kept[:count]


def _is_prompt(tokenizer: Any, frame: Frame, user: list[int]) -> bool:
    """Plain text for which the template gives exactly these ids?"""
    if frame.special.intersection(user):
        return False
    messages = [{"role": "user", "content": tokenizer.decode(user)}]
    try:
        text = render(tokenizer, messages, generation=True)
    except SkipRow:
        return False
    expected = [*frame.prefix, *user, frame.user_end, *frame.suffix]
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) == expected


def _sample(frame: Frame, user: list[int], answer: list[int]) -> tuple[list[int], list[bool]]:
    prompt = [*frame.prefix, *user, frame.user_end, *frame.suffix]
    return prompt + answer, [False] * len(prompt) + [True] * len(answer)


def config_identity(config: Any) -> str:
    """Hash of what a config says of its model."""
    return cache_key(json.loads(json.dumps(model_description(config), default=str)))


def weight_samples(model: Any) -> dict[str, list[Any]]:
    """Name of every weight -> its shape and a few of its values."""
    found = {}
    for name, weight in model.named_parameters():
        step = max(1, weight.numel() // 16)
        values = weight.detach().reshape(-1)[::step].double().cpu().tolist()
        found[name] = [list(weight.shape), values]
    return found


def model_identity(model: Any) -> dict[str, Any]:
    """A model in a cache key: config, dtype, kind of device, a few values of every weight."""
    return {
        "config": config_identity(model.config),
        "weights": cache_key(weight_samples(model)),
        "dtype": str(model.dtype),
        "device": model.device.type,
    }


def synthesized_store(
    model: Any,
    tokenizer: Any,
    *,
    count: int,
    max_prompt_tokens: int = 64,
    max_answer_tokens: int = 256,
    batch_size: int = 64,
    seed: int = 0,
    progress: Progress | None = None,
    root: Path | None = None,
) -> TokenStore:
    """`synthesize` into a cached store, or the store of an earlier, identical call.

    The key covers the model, tokenizer, template, every option and this code.
    """
    options = {
        "count": count,
        "max_prompt_tokens": max_prompt_tokens,
        "max_answer_tokens": max_answer_tokens,
        "batch_size": batch_size,
        "seed": seed,
    }
    check_tokenizer(tokenizer)
    parts = {
        "model": model_identity(model),
        "options": options,
        "code": code_version(__file__, decoding.__file__, store.__file__, store_files.__file__),
        "torch": torch.__version__,
        "tokenizer": identity(tokenizer, ChatOptions()),
    }

    def build(path: Path) -> None:
        samples = synthesize(model, tokenizer, progress=progress, **options)
        with StoreWriter(path) as writer:
            for ids, mask in samples:
                writer.append(ids, mask)
            writer.close(info=options)

    return cached_store(parts, build, root=root)
