"""Rows to token ids and loss mask, many at once: one call of the tokenizer for a whole chunk."""

from __future__ import annotations

import hashlib
import json
import struct
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dflash_ext.data import append_only, chat, formats, rows, templates
from dflash_ext.data.chat import Sample, SpanFinder
from dflash_ext.data.formats import Conversation, Text, Tokens, parse_row
from dflash_ext.data.rows import ChatOptions, Row, SkipRow, has_candidate
from dflash_ext.data.store_files import code_version
from dflash_ext.data.templates import Renderer, check_backend

_CROSSES = "a token crosses the border of a turn"
_TOO_FEW = "too few supervised tokens"


class RowEncoder:
    """Encodes rows for one tokenizer. Make one per process: it caches templates and tables.

    Raises UserError for a tokenizer without a tokenizer.json; one without a chat template is an
    error once a row needs it.
    """

    def __init__(self, tokenizer: Any, options: ChatOptions) -> None:
        check_backend(tokenizer)
        self._tokenizer, self._options = tokenizer, options
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self._vocabulary = max(vocabulary.values(), default=-1) + 1
        self._lengths = byte_lengths(tokenizer)
        self._composes = self._backend.normalizer is not None
        self._finder: SpanFinder | None = None
        probe = self._backend.encode("a", add_special_tokens=True)
        before = probe.special_tokens_mask.index(0) if 0 in probe.special_tokens_mask else 0
        self._text_prefix = np.asarray(probe.ids[:before], dtype=np.int32)

    def encode(self, rows: Sequence[Any]) -> list[list[Row] | SkipRow]:
        """Per row, in order: its samples (at least one) or the reason why there are none.

        rows: any JSON-like values, see `formats`. Raises UserError for a conversation if the
        tokenizer has no chat template, and nothing else.
        """
        results: list[list[Row] | SkipRow] = [[] for _ in rows]
        jobs: list[tuple[int, Sample]] = []
        for i, row in enumerate(rows):
            try:
                parsed = parse_row(row)
                if isinstance(parsed, Tokens):
                    results[i] = self._given(parsed)
                else:
                    jobs += [(i, sample) for sample in self._samples(parsed)]
            except SkipRow as skip:
                results[i] = skip
        # Without character offsets where the tokens' own lengths say the same: less work.
        fast = self._lengths is not None
        encode = self._backend.encode_batch_fast if fast else self._backend.encode_batch
        encodings = encode([sample.text for _, sample in jobs], add_special_tokens=False)
        lost = [0] * len(rows)  # supervised turns of samples that came to nothing
        for (i, sample), encoding in zip(jobs, encodings):
            found = results[i]
            if isinstance(found, SkipRow):
                continue
            try:
                made = self._rows(sample, encoding)
            except SkipRow as skip:
                results[i] = skip
                continue
            found += made
            lost[i] += 0 if made else len(sample.spans)
        return [self._outcome(result, turns) for result, turns in zip(results, lost)]

    def _outcome(self, result: list[Row] | SkipRow, lost: int) -> list[Row] | SkipRow:
        if isinstance(result, SkipRow):
            return result
        if not result:
            return SkipRow(_TOO_FEW, f"within max_length {self._options.max_length}")
        if lost:
            last = result[-1]
            cut = last.cut or "turns"
            result[-1] = replace(last, cut=cut, cut_turns=last.cut_turns + lost)
        return result

    def _samples(self, parsed: Conversation | Text) -> list[Sample]:
        if isinstance(parsed, Text):
            return [Sample(parsed.text, [])]
        if self._finder is None:
            options = self._options
            renderer = Renderer(
                self._tokenizer, date=options.date, arguments=options.template_arguments()
            )
            self._finder = SpanFinder(
                renderer, supervise=options.supervise, reasoning=options.reasoning
            )
        return self._finder.samples(parsed)

    def _given(self, tokens: Tokens) -> list[Row]:
        """Each run of supervised tokens is a turn."""
        if int(tokens.ids.max()) >= self._vocabulary:
            raise SkipRow(
                "token id outside the vocabulary",
                f"{int(tokens.ids.max())}, the tokenizer knows {self._vocabulary}",
            )
        edges = np.flatnonzero(np.diff(tokens.mask.astype(np.int8), prepend=0, append=0)).tolist()
        turns = list(zip(edges[::2], edges[1::2]))
        return self._cut(tokens.ids.astype(np.int32), turns)

    def _rows(self, sample: Sample, encoding: Any) -> list[Row]:
        found = encoding.ids
        # A third of the time that numpy takes to read a list of integers.
        ids = np.frombuffer(struct.pack(f"<{len(found)}i", *found), dtype="<i4")
        if not sample.spans:
            return list(self._windows(ids))
        bounds = None
        if self._lengths is not None and not self._is_recomposed(sample.text):
            bounds = bounds_by_bytes(self._lengths[ids], sample)
        if bounds is None:
            bounds = self._bounds_by_offsets(sample)
        return self._cut(ids, bounds)

    def _is_recomposed(self, text: str) -> bool:
        """Might the tokenizer have changed the text before splitting it (Unicode composition)?"""
        return self._composes and not (text.isascii() or unicodedata.is_normalized("NFC", text))

    def _windows(self, ids: np.ndarray) -> Iterator[Row]:
        """Plain text, all of it supervised, each window behind the tokenizer's own prefix."""
        prefix = self._text_prefix
        size = max(1, self._options.max_length - len(prefix))
        for start in range(0, len(ids), size):
            part = ids[start : start + size]
            mask = np.arange(len(prefix) + len(part)) >= len(prefix)
            if has_candidate(mask):
                yield Row(np.concatenate([prefix, part]), mask)

    def _bounds_by_offsets(self, sample: Sample) -> list[tuple[int, int]]:
        """`bounds_by_bytes` for any tokenizer, from its character offsets and by decoding."""
        encoding = self._backend.encode(sample.text, add_special_tokens=False)
        ids, offsets = encoding.ids, encoding.offsets
        bounds = []
        for start, end in sample.spans:
            shown = repr(sample.text[start : start + 20])
            inside = [i for i, (a, b) in enumerate(offsets) if a < end and b > start]
            if not inside or offsets[inside[0]][0] < start or offsets[inside[-1]][1] > end:
                raise SkipRow(_CROSSES, shown)
            first, last = inside[0], inside[-1] + 1
            back = self._backend.decode(ids[first:last], skip_special_tokens=False)
            # Some tokenizers leave a token's leading space out of its offsets.
            if back[:1].isspace() and not sample.text[start].isspace():
                raise SkipRow(_CROSSES, shown)
            if chat.squeeze(back) != chat.squeeze(sample.text[start:end]):
                raise SkipRow("text does not survive the tokenizer", shown)
            bounds.append((first, last))
        return bounds

    def _cut(self, ids: np.ndarray, bounds: list[tuple[int, int]]) -> list[Row]:
        mask = np.zeros(len(ids), dtype=np.bool_)
        for first, last in bounds:
            mask[first:last] = True
        length, cut, turns = fit(len(ids), bounds, self._options.max_length)
        row = Row(ids[:length], mask[:length], cut, len(ids) - length, turns)
        return [row] if has_candidate(row.mask) else []


def fit(length: int, bounds: list[tuple[int, int]], max_length: int) -> tuple[int, str, int]:
    """(tokens kept, kind of cut, turns left out) of a conversation of `length` tokens.

    bounds: first and past-the-end token of every supervised turn. Kept are whole turns; if not even
    the first fits, its beginning is.
    """
    if length <= max_length:
        return length, "", 0
    whole = sum(last <= max_length for _, last in bounds)
    if whole == len(bounds):  # what is lost is what the template writes behind the last answer
        return max_length, "", 0
    if whole:
        return bounds[whole - 1][1], "turns", len(bounds) - whole
    return max_length, "answer", len(bounds) - 1


def byte_lengths(tokenizer: Any) -> np.ndarray | None:
    """int32 [V]: bytes of text behind each token; None if tokens do not stand for fixed bytes.

    They do in byte-level BPE: each character of a token's name spells one byte. With these lengths
    a token's place needs no offsets, and a text with bytes unknown to the tokenizer adds up wrong.
    """
    backend = tokenizer.backend_tokenizer
    spec = json.loads(backend.to_str())
    splitters = spec["pre_tokenizer"] or {}
    splitters = splitters.get("pretokenizers", [splitters])
    byte_level = [s for s in splitters if s.get("type") == "ByteLevel"]
    plain = all(s.get("type") in ("ByteLevel", "Split", "Digits") for s in splitters)
    normalizer = (spec["normalizer"] or {"type": "NFC"})["type"]
    model = spec["model"]
    if (
        model.get("type") != "BPE"
        or len(byte_level) != 1
        or byte_level[0].get("add_prefix_space")
        or not plain
        or normalizer != "NFC"
        or model.get("byte_fallback")
        or model.get("continuing_subword_prefix")
        or model.get("end_of_word_suffix")
    ):
        return None
    names = backend.get_vocab(with_added_tokens=True)
    lengths = np.zeros(max(names.values()) + 1, dtype=np.int32)
    for name, token in names.items():
        lengths[token] = len(name)
    for token, added in backend.get_added_tokens_decoder().items():
        lengths[token] = len(added.content.encode())
    if model.get("unk_token") in names:
        lengths[names[model["unk_token"]]] = 1 << 24  # no text adds up with it
    return lengths


def bounds_by_bytes(lengths: np.ndarray, sample: Sample) -> list[tuple[int, int]] | None:
    """First and past-the-end token of every span; None if the tokens do not spell the text.

    lengths: int [n], bytes of each token of the text. Raises SkipRow for a token that lies across a
    span's border: the model, given the prompt alone, would have read other tokens.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    flat = _byte_positions(sample)
    if len(ends) == 0 or ends[-1] != flat.pop():
        return None
    counts = np.searchsorted(ends, flat, side="right")  # tokens that end there or before
    exact = ends[counts - 1] == flat
    if not exact.all():
        # A text may begin with a span; a span never ends where it begins.
        wrong = [i for i, good in enumerate(exact.tolist()) if not good and flat[i]]
        if wrong:
            start = sample.spans[wrong[0] // 2][0]
            raise SkipRow(_CROSSES, repr(sample.text[start : start + 20]))
    found = counts.tolist()
    return list(zip(found[::2], found[1::2]))


def _byte_positions(sample: Sample) -> list[int]:
    """Bytes in front of each span's start and end, in order, and of the whole text."""
    text = sample.text
    flat = [position for span in sample.spans for position in span] + [len(text)]
    if text.isascii():
        return flat
    out, done, size = [], 0, 0
    for position in flat:
        size += len(text[done:position].encode())
        done = position
        out.append(size)
    return out


def encode_row(tokenizer: Any, row: Any, options: ChatOptions) -> list[Row]:
    """`RowEncoder.encode` for one row, raising its SkipRow. Builds an encoder: slow for many."""
    (result,) = RowEncoder(tokenizer, options).encode([row])
    if isinstance(result, SkipRow):
        raise result
    return result


def identity(tokenizer: Any, options: ChatOptions) -> dict[str, Any]:
    """Everything that decides what rows become, JSON-able, for cache keys (requirement 4)."""
    import tokenizers
    import transformers

    check_backend(tokenizer)
    modules = [str(m.__file__) for m in (append_only, chat, formats, rows, templates)]
    return {
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "special": sorted(tokenizer.all_special_ids),
        "special_tokens": {k: str(v) for k, v in tokenizer.special_tokens_map.items()},
        "template": tokenizer.chat_template,
        "options": options.key(),
        "code": code_version(__file__, *modules),
        "versions": [transformers.__version__, tokenizers.__version__],
    }
