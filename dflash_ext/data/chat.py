"""Conversations to token ids and loss mask, by asking the chat template where an answer begins.

Supervised is what the model would have written itself: the assistant's text and the token that
ends its turn. No template is known by name; three renders of a turn say everything:

    prompt   = render(turns before, generation prompt)      what the model is given
    turn     = render(turns before + this one)              must begin with `prompt`
    template = render(turns before + a sentinel answer)     what the template itself adds
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from dflash_ext.data.store import StoreWriter, TokenStore, cached_store, code_version
from dflash_ext.errors import UserError

# Survives trimming, contains nothing a template or a tokenizer's added tokens could react to.
SENTINEL = "Zq7Sentinel7qZ"
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Row:
    """One sample: n token ids and n mask values (True: supervised)."""

    ids: list[int]
    mask: list[bool]


class SkipRow(Exception):
    """This conversation cannot be trained on. `reason`: short, stable; `detail`: this case."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass
class PrepareReport:
    """What became of every row: rows == trained + sum(skipped.values())."""

    rows: int = 0
    trained: int = 0
    samples: int = 0
    """More than `trained` where a template made a conversation one sample per turn."""
    skipped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    """reason -> line number and detail of the first row skipped for it."""

    def __str__(self) -> str:
        lines = [f"{self.rows} rows: {self.trained} trained ({self.samples} samples)"]
        lines += [
            f"  {count} skipped: {reason} (first: {self.examples[reason]})"
            for reason, count in sorted(self.skipped.items(), key=lambda item: -item[1])
        ]
        return "\n".join(lines)


def check_tokenizer(tokenizer: Any) -> None:
    """UserError, naming the tokenizer's path, if it has no chat template or no offsets."""
    name = getattr(tokenizer, "name_or_path", "") or "(in memory)"
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"tokenizer {name} has no chat template; expected one in its tokenizer_config.json or "
            "chat_template.jinja. Use an instruct model or add the template"
        )
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"tokenizer {name} reports no character offsets, which the loss mask needs; expected "
            "one with a tokenizer.json"
        )


def render(tokenizer: Any, messages: list[dict[str, Any]], *, generation: bool) -> str:
    """The template's text. Raises SkipRow where the template refuses the conversation."""
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation
        )
    # A template is a program of its author: it may raise anything on input it does not expect.
    except Exception as error:
        raise SkipRow("template refused the conversation", _first_line(error)) from None
    return str(text)


def end_of_turn(tokenizer: Any, text: str) -> int:
    """Characters of `text`, which follows a turn's content, up to the end of its end-of-turn token.

    Raises SkipRow if no special token is in `text`: then nothing ends the turn.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    for token, (_, end) in zip(encoded["input_ids"], encoded["offset_mapping"]):
        if token in special:
            return int(end)
    raise SkipRow("template has no end-of-turn token", f"an answer is followed by {text!r}")


def encode_conversation(tokenizer: Any, messages: Any, *, max_length: int) -> list[Row]:
    """Samples of one conversation, each cut to `max_length` tokens.

    One sample with every assistant turn supervised; where the template rewrites history (drops
    earlier thinking), one sample per assistant turn, each as the model sees it when that turn is
    its last. Samples without an anchor candidate after the cut are left out.
    Raises SkipRow with the reason if nothing can be trained, UserError for an unusable tokenizer.
    """
    check_tokenizer(tokenizer)
    _validate(messages)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    messages = messages[: answers[-1] + 1]
    turns = [_render_turn(tokenizer, messages, i) for i in answers]
    whole = turns[-1][0]
    if all(whole.startswith(text[:end]) for text, _, end in turns):
        samples = [(whole, [(start, end) for _, start, end in turns])]
    else:
        samples = [(text, [(start, end)]) for text, start, end in turns]
    rows = [_tokenize(tokenizer, text, spans) for text, spans in samples]
    rows = [Row(row.ids[:max_length], row.mask[:max_length]) for row in rows]
    rows = [row for row in rows if _has_candidate(row.mask)]
    if not rows:
        raise SkipRow("too few supervised tokens", f"within max_length {max_length}")
    return rows


def _validate(messages: Any) -> None:
    if not isinstance(messages, list):
        raise SkipRow("messages is not a list", type(messages).__name__)
    if not messages:
        raise SkipRow("messages is empty")
    for message in messages:
        _validate_message(message)
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    if "system" in turns:
        raise SkipRow("system message is not the first")
    if not turns:
        raise SkipRow("only a system message")
    if turns[0] == "assistant":
        raise SkipRow("assistant speaks first")
    if any(a == b for a, b in pairwise(turns)):
        raise SkipRow("roles do not alternate", ", ".join(turns[:6]))
    if "assistant" not in turns:
        raise SkipRow("no assistant turn")
    if any(m["role"] == "assistant" and not m["content"].strip() for m in messages):
        raise SkipRow("assistant's content is empty")


def _validate_message(message: Any) -> None:
    if not isinstance(message, dict):
        raise SkipRow("message is not an object", type(message).__name__)
    role, content = message.get("role"), message.get("content")
    if role == "tool" or message.get("tool_calls"):
        raise SkipRow("tool calls are not supported")
    if role not in _ROLES:
        raise SkipRow("unknown role", f"{role!r}, expected one of {', '.join(_ROLES)}")
    if content is None:
        raise SkipRow("content is null")
    if isinstance(content, list):
        raise SkipRow("content is a list of parts", "expected one string")
    if not isinstance(content, str):
        raise SkipRow("content is not a string", type(content).__name__)
    if not is_utf8(message):
        raise SkipRow("text is not UTF-8", "it holds a lone surrogate")


def is_utf8(message: dict[str, Any]) -> bool:
    """Can a tokenizer read every text of a message? JSON can spell lone surrogates, UTF-8 not."""
    try:
        for value in message.values():
            if isinstance(value, str):
                value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _render_turn(
    tokenizer: Any, messages: list[dict[str, Any]], index: int
) -> tuple[str, int, int]:
    """(text up to and with turn `index`, start and end of its supervised characters)."""
    before, answer = messages[:index], messages[index]
    prompt = render(tokenizer, before, generation=True)
    text = render(tokenizer, [*before, answer], generation=False)
    probe = render(tokenizer, [*before, {**_bare(answer), "content": SENTINEL}], generation=False)
    if not text.startswith(prompt) or not probe.startswith(prompt):
        raise SkipRow("template's answer does not extend its prompt", f"message {index}")
    leading, found, trailing = probe[len(prompt) :].partition(SENTINEL)
    if not found or SENTINEL in trailing or not text.endswith(trailing):
        raise SkipRow("template changes the assistant's text", f"message {index}")
    # What the template writes before ANY answer (an empty think block) is not the model's text;
    # mere white space is: it lies behind the prompt, so the model has to produce it.
    start = len(prompt)
    if leading.strip() and text.startswith(leading, start):
        start += len(leading)
    content_end = len(text) - len(trailing)
    if not _same_text(text[:start], text[start:content_end], answer):
        raise SkipRow("template changes the assistant's text", f"message {index}")
    return text, start, content_end + end_of_turn(tokenizer, trailing)


def _bare(answer: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in answer.items() if k not in ("reasoning_content", "reasoning")}


def _same_text(prompt: str, rendered: str, answer: dict[str, Any]) -> bool:
    """Is `rendered` the message's own text, but for white space the template trims or adds?"""
    own, expected = _squeeze(rendered), _squeeze(answer["content"])
    reasoning = answer.get("reasoning_content") or answer.get("reasoning")
    if isinstance(reasoning, str) and reasoning.strip():
        # Rendered as <think>reasoning</think>content: the tags are the model's to write as well.
        return own.endswith(expected) and _squeeze(reasoning) in own
    # A generation prompt may open the think block which the message's text opens itself.
    opened = expected.removesuffix(own)
    return own == expected or (opened != expected and _squeeze(prompt).endswith(opened))


def _squeeze(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).split())


def _tokenize(tokenizer: Any, text: str, spans: list[tuple[int, int]]) -> Row:
    """Ids of the whole text in one go, masked where they lie inside one of the spans.

    Refused is a token across a span's border: the model, given the prompt alone, would have
    tokenised it otherwise; and a text which its own tokens do not give back.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    mask = [False] * len(ids)
    for start, end in spans:
        inside = [i for i, (a, b) in enumerate(offsets) if a < end and b > start]
        if any(offsets[i][0] < start or offsets[i][1] > end for i in inside):
            raise SkipRow("a token crosses the border of a turn", repr(text[start : start + 20]))
        supervised = [ids[i] for i in inside]
        back = tokenizer.decode(supervised, clean_up_tokenization_spaces=False)
        # Some tokenizers leave a token's leading space out of its offsets.
        if back[:1].isspace() and not text[start].isspace():
            raise SkipRow("a token crosses the border of a turn", repr(text[start : start + 20]))
        if _squeeze(back) != _squeeze(text[start:end]):
            raise SkipRow("text does not survive the tokenizer", repr(text[start : start + 20]))
        for i in inside:
            mask[i] = True
    return Row(list(ids), mask)


def _has_candidate(mask: list[bool]) -> bool:
    return any(a and b for a, b in pairwise(mask))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]


def prepare_jsonl(
    path: Path | str,
    tokenizer: Any,
    store_path: Path | str,
    *,
    max_length: int,
) -> PrepareReport:
    """Encode a JSONL file (rows with `messages`) into a new store; each row trained or skipped.

    The report is saved in the store (`TokenStore.info`). Blank lines are no rows.
    Raises UserError, and leaves no store, when no row can be trained.
    """
    check_tokenizer(tokenizer)
    if max_length < 2:
        raise UserError(f"max_length {max_length}: expected at least 2")
    report = PrepareReport()
    skipped: Counter[str] = Counter()
    try:
        lines = open(path, "rb")  # noqa: SIM115  (closed by the with below)
    except OSError as error:
        raise _unreadable(path, error) from None
    with lines, StoreWriter(store_path) as writer:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            report.rows += 1
            try:
                samples = encode_conversation(tokenizer, _messages(line), max_length=max_length)
            except SkipRow as skip:
                skipped[skip.reason] += 1
                report.examples.setdefault(skip.reason, f"line {number} {skip.detail}".rstrip())
                continue
            for sample in samples:
                writer.append(sample.ids, sample.mask, row=report.rows)
            report.trained += 1
        report.samples, report.skipped = writer.samples, dict(skipped)
        if report.trained == 0:
            reasons = "; ".join(f"{count} {reason}" for reason, count in skipped.most_common())
            raise UserError(
                f"0 trainable rows of {report.rows} in {path}"
                + (f" (skipped: {reasons})" if reasons else "")
                + "; expected JSON rows with `messages` of role and content"
            )
        writer.close(info=asdict(report))
    return report


def _unreadable(path: Path | str, error: OSError) -> UserError:
    return UserError(f"cannot read {path}: {error.strerror}; expected a JSONL file")


def _messages(line: bytes) -> Any:
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        raise SkipRow("not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise SkipRow("not JSON", _first_line(error)) from None
    if not isinstance(row, dict) or "messages" not in row:
        raise SkipRow("no messages field")
    return row["messages"]


def tokenizer_identity(tokenizer: Any) -> dict[str, Any]:
    """Everything of a tokenizer that changes ids or renders, for cache keys."""
    import tokenizers
    import transformers

    return {
        "tokenizer": tokenizer.backend_tokenizer.to_str(),
        "special": sorted(tokenizer.all_special_ids),
        "template": tokenizer.chat_template,
        "versions": [transformers.__version__, tokenizers.__version__],
    }


def prepared_store(
    path: Path | str,
    tokenizer: Any,
    *,
    max_length: int,
    root: Path | None = None,
) -> tuple[TokenStore, PrepareReport]:
    """`prepare_jsonl` into the cache, or the result of an earlier, identical call.

    The key covers the data's bytes, tokenizer, template, options and this code (requirement 4).
    """
    from dflash_ext.data import store
    from dflash_ext.data.registry import sha256_file

    check_tokenizer(tokenizer)
    try:
        digest = sha256_file(Path(path))
    except OSError as error:
        raise _unreadable(path, error) from None
    parts = {
        "data": digest,
        "max_length": max_length,
        "code": code_version(__file__, store.__file__),
        **tokenizer_identity(tokenizer),
    }

    def build(target: Path) -> None:
        prepare_jsonl(path, tokenizer, target, max_length=max_length)

    result = cached_store(parts, build, root=root)
    return result, PrepareReport(**result.info)
