"""Regeneration by a server: many conversations at once, each turn by turn."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_ext.data.dialogue import answered_row, next_prompt, request
from dflash_ext.data.endpoint import Endpoint, Refused, Unavailable
from dflash_ext.data.formats import Conversation, Message
from dflash_ext.data.journal import Journal
from dflash_ext.data.regeneration import (
    Item,
    Progress,
    Report,
    counted,
    derived_seed,
    write_rows,
)
from dflash_ext.data.rows import ChatOptions, SkipRow
from dflash_ext.data.unordered import unordered
from dflash_ext.errors import UserError

if TYPE_CHECKING:
    from dflash_ext.regenerate import Options

KEY_VARIABLE = "DFLASH_API_KEY"
"""Environment variable with the endpoint's key."""
_GIVE_UP = 8
"""Conversations in a row without any answer after which the endpoint is called dead."""


def by_endpoint(
    options: Options,
    items: Callable[[], Iterator[Item]],
    partial: Path,
    total: int,
    told: Progress,
) -> Report:
    """`regenerate` through `options.endpoint`."""
    assert options.endpoint is not None
    endpoint = Endpoint(
        options.endpoint,
        api_key=os.environ.get(KEY_VARIABLE) or None,
        timeout=options.timeout,
        attempts=options.attempts,
    )
    model = options.model or _only_model(endpoint)
    sampling = options.sampling(model)
    journal = Journal(partial, sampling)
    keep = True
    try:
        tell = counted(journal, total, told)
        missing = ask_endpoint(endpoint, items(), journal, options, model, tell)

        def rows_of(item: Item, entry: dict[str, Any]) -> list[dict[str, Any]]:
            assert isinstance(item.prompt, Conversation)
            return [{**answered_row(item.prompt, entry["answers"]), "sampling": sampling}]

        report = write_rows(options.out, items(), journal, missing, rows_of)
        keep = bool(missing)
    finally:
        endpoint.stop()
        journal.close(remove=not keep)
    return report


def _only_model(endpoint: Endpoint) -> str:
    names = endpoint.models()
    if len(names) != 1:
        shown = ", ".join(names[:10]) or "none"
        raise UserError(f"endpoint {endpoint.url} serves {shown}; name one by --model")
    return names[0]


def ask_endpoint(
    endpoint: Endpoint,
    items: Iterator[Item],
    journal: Journal,
    options: Options,
    model: str,
    told: Callable[[int], None],
) -> dict[str, str]:
    """Ask for what the journal lacks. Returns {key: why} of the conversations without an answer.

    UserError if the endpoint answers nobody any more; what was answered is in the journal.
    """
    settings = {"model": model, "temperature": options.temperature}
    settings |= {"top_p": options.top_p, "max_tokens": options.max_tokens}
    arguments = ChatOptions(template_kwargs=options.template_kwargs).template_arguments()
    if arguments:
        settings["chat_template_kwargs"] = arguments

    def work(item: Item) -> int | Unavailable:
        """Tokens of the answers, which are noted at once: whatever stops the others, they stay."""
        assert isinstance(item.prompt, Conversation)
        body = dict(settings)
        if options.temperature:
            body["seed"] = derived_seed(options.seed, item.key)
        try:
            entry = _converse(endpoint, item.prompt, body)
        except Unavailable as error:
            missing[item.key] = str(error)
            return error
        journal.add(item.key, **entry)
        return int(entry["tokens"])

    missing: dict[str, str] = {}
    streak = 0
    wanted = (item for item in items if _is_wanted(item, journal))
    for outcome in unordered(wanted, work, threads=options.concurrency):
        streak = streak + 1 if isinstance(outcome, Unavailable) else 0
        if streak >= _GIVE_UP:
            raise UserError(
                f"endpoint {endpoint.url}: {outcome}; {len(journal)} conversations are kept in "
                f"{journal.path}, run it again to go on"
            )
        if isinstance(outcome, int):
            told(outcome)
    return missing


def _is_wanted(item: Item, journal: Journal) -> bool:
    return not isinstance(item.prompt, SkipRow) and item.key not in journal


def _converse(
    endpoint: Endpoint, conversation: Conversation, settings: dict[str, Any]
) -> dict[str, Any]:
    """A journal's entry: the answers, and why there are not more if the endpoint refused one."""
    answers: list[Message] = []
    tokens, refusal = 0, ""
    while (prompt := next_prompt(conversation, answers)) is not None:
        try:
            answer = endpoint.chat({**request(conversation, prompt), **settings})
        except Refused as error:
            refusal = str(error)
            break
        tokens += answer.tokens
        cut = {} if answer.finished else {"unfinished": True}
        answers.append({**answer.message, **cut})
    return {"answers": answers, "tokens": tokens, "refusal": refusal}
