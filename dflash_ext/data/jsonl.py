"""Chat files into a store, one process; prepare.py takes its place."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dflash_ext.data.encode import RowEncoder, identity
from dflash_ext.data.rows import ChatOptions, Row, SkipRow
from dflash_ext.data.store import StoreWriter, TokenStore, cached_store, code_version
from dflash_ext.data.templates import check_tokenizer
from dflash_ext.errors import UserError


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
    encoder = RowEncoder(tokenizer, ChatOptions(max_length=max_length))
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
                samples = _encode(encoder, line)
            except SkipRow as skip:
                skipped[skip.reason] += 1
                report.examples.setdefault(skip.reason, f"line {number} {skip.detail}".rstrip())
                continue
            for sample in samples:
                writer.append(sample.ids.tolist(), sample.mask.tolist(), row=report.rows)
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


def _encode(encoder: RowEncoder, line: bytes) -> list[Row]:
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        raise SkipRow("not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise SkipRow("not JSON", str(error)) from None
    (result,) = encoder.encode([row])
    if isinstance(result, SkipRow):
        raise result
    return result


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
        "writer": code_version(__file__, store.__file__),
        "encoder": identity(tokenizer, ChatOptions(max_length=max_length)),
    }

    def build(target: Path) -> None:
        prepare_jsonl(path, tokenizer, target, max_length=max_length)

    result = cached_store(parts, build, root=root)
    return result, PrepareReport(**result.info)
