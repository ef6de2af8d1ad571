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
from transformers import DynamicCache, DynamicLayer

from dflash_ext.data import store
from dflash_ext.data.encode import identity
from dflash_ext.data.rows import ChatOptions, SkipRow
from dflash_ext.data.store import StoreWriter, TokenStore, cache_key, cached_store, code_version
from dflash_ext.data.templates import SENTINEL, check_tokenizer, end_of_turn, render
from dflash_ext.errors import UserError
from dflash_ext.target import cache_argument

TOP_P = 0.95
# Rows are looked at, and finished ones dropped, once in so many steps: one host sync each.
_CHECK_EVERY = 8
# Copying the cache to drop rows pays once this share of them is finished.
_DROP_SHARE = 0.1
# Candidates drawn per sampled token: all outside the nucleus has probability below 0.05 ** 4.
_DRAWS = 4
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


def sample_top_p(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Token int64 [R] drawn at temperature 1 from the TOP_P nucleus of `logits` [R, V].

    Without a sort: candidates are drawn from the whole distribution in an exponential race, and
    the first to cross the line that lies in the nucleus is a draw from the nucleus.
    """
    probs = logits.float().softmax(-1)
    noise = torch.empty_like(probs).exponential_(generator=generator)
    drawn = (probs / noise).topk(_DRAWS, dim=-1).indices  # [R, _DRAWS], first arrival first
    drawn_probs = probs.gather(-1, drawn)
    choice = logits.argmax(-1)
    for draw in reversed(range(_DRAWS)):
        # In the nucleus: the tokens more probable than this one do not fill it already.
        above = torch.where(probs > drawn_probs[:, draw, None], probs, 0.0).sum(-1)
        choice = torch.where(above < TOP_P, drawn[:, draw], choice)
    return choice


class _Buffered(DynamicLayer):
    """A model layer's cache that writes into one allocation instead of growing by copies."""

    def __init__(self, keys: Tensor, values: Tensor, capacity: int) -> None:
        super().__init__()
        self.dtype, self.device = keys.dtype, keys.device
        self._buffers = [self._allocate(x, capacity) for x in (keys, values)]
        self._length = keys.shape[-2]
        self.is_initialized = True
        self._show()

    @staticmethod
    def _allocate(x: Tensor, capacity: int) -> Tensor:
        buffer = x.new_empty(*x.shape[:2], capacity, x.shape[-1])
        buffer[:, :, : x.shape[-2]] = x
        return buffer

    def _show(self) -> tuple[Tensor, Tensor]:
        keys, values = (buffer[:, :, : self._length] for buffer in self._buffers)
        self.keys, self.values = keys, values
        return keys, values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        start, self._length = self._length, self._length + key_states.shape[-2]
        for buffer, new in zip(self._buffers, (key_states, value_states)):
            buffer[:, :, start : self._length] = new
        return self._show()

    def batch_select_indices(self, indices: Tensor) -> None:
        self._buffers = [buffer[indices] for buffer in self._buffers]
        self._show()


def _forward(model: Any, ids: Tensor, cache: Any) -> Tensor:
    """Logits [rows, V] of the last position; `cache` grows by `ids` [rows, n]."""
    logits: Tensor = model(input_ids=ids, use_cache=True, **{cache_argument(model): cache}).logits
    return logits[:, -1]


def _start_cache(model: Any, prefix: list[int], rows: int, capacity: int) -> tuple[Tensor, Any]:
    """Logits [rows, V] after the prefix, and the cache holding it: computed once for all rows."""
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([prefix], device=model.device)
    logits = _forward(model, ids, cache)
    if all(hasattr(layer, "batch_repeat_interleave") for layer in cache.layers):
        cache.batch_repeat_interleave(rows)
        logits = logits.expand(rows, -1)
    else:  # a recurrent state, for instance
        cache = DynamicCache(config=model.config)
        logits = _forward(model, ids.expand(rows, -1), cache)
    # Exactly DynamicLayer: its subclasses (sliding windows) keep less than everything.
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.is_initialized:
            assert layer.keys is not None
            assert layer.values is not None
            cache.layers[i] = _Buffered(layer.keys, layer.values, capacity)
    return logits, cache


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
    logits, cache = _start_cache(model, frame.prefix, rows, P + longest)
    droppable = all(hasattr(layer, "batch_select_indices") for layer in cache.layers)
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
        if (step + 1) % _CHECK_EVERY == 0 or step == longest - 1:
            fresh = (done & ~seen).nonzero().flatten()
            for row, end, tokens in zip(
                index[fresh].tolist(), user_end[fresh].tolist(), written[fresh].tolist()
            ):
                if 0 < end < longest:
                    answer = tokens[end + 1 + S : step + 1][:max_answer_tokens]
                    yield row, tokens[:end], _up_to(answer, frame.stops)
            seen |= done
            left = (~done).nonzero().flatten()
            if left.numel() == 0:
                return
            if droppable and left.numel() <= (1 - _DROP_SHARE) * done.numel():
                cache.batch_select_indices(left)
                written, index, user_end, token, done, seen = (
                    x[left] for x in (written, index, user_end, token, done, seen)
                )
        logits = _forward(model, token[:, None], cache)


def _ask(logits: Tensor, asking: Tensor, token: Tensor, generator: torch.Generator) -> Tensor:
    """`token` [rows] with the rows that are `asking` sampled."""
    if logits.device.type != "cpu":
        # Sampling for all rows costs a GPU less than finding out which ones need it.
        return torch.where(asking, sample_top_p(logits, generator), token)
    rows = asking.nonzero().flatten()
    return token.index_copy(0, rows, sample_top_p(logits[rows], generator))


def _up_to(answer: list[int], stops: list[int]) -> list[int]:
    """Through the first stop token: a row runs on, past its end, until it is looked at."""
    stop = next((i for i, token in enumerate(answer) if token in stops), len(answer))
    return answer[: stop + 1]


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


def model_identity(model: Any) -> dict[str, Any]:
    """A model in a cache key: config, dtype, kind of device, a few values of every weight."""
    config = model.config.to_dict()
    for name in ("transformers_version", "_name_or_path", "dtype", "torch_dtype"):
        config.pop(name, None)
    weights = {}
    for name, weight in model.named_parameters():
        step = max(1, weight.numel() // 16)
        values = weight.detach().reshape(-1)[::step].double().cpu().tolist()
        weights[name] = [list(weight.shape), values]
    return {
        "config": cache_key(json.loads(json.dumps(config, default=str))),
        "weights": cache_key(weights),
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
        "code": code_version(__file__, store.__file__),
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
