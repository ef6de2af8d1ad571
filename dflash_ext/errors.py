"""Errors a user can cause and mend. Entry points print them as one line and exit with code 2."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UserError(ValueError):
    """Wrong input: one line says what was wrong, what was expected and what to do."""


class FeatureError(RuntimeError):
    """A feature batch does not match the tokens it is said to belong to; never train on it."""


def one_line(error: BaseException) -> str:
    """The first line of what an error says, or its name if it says nothing."""
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


def parse_options(kind: type[T], arguments: list[str], **more: Any) -> T:
    """`tyro.cli(kind, args=arguments, **more)`, but what options have against their values, a
    UserError, is raised as one instead of being framed and explained by tyro."""
    import tyro

    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return tyro.cli(kind, args=arguments, **more)
    except SystemExit as stop:
        if not stop.code:  # help was asked for and given
            raise
        error: BaseException | None = stop
        while error is not None and not isinstance(error, UserError):
            error = error.__context__
    if error is not None:
        raise error from None
    return tyro.cli(kind, args=arguments, **more)  # again, for its own words about its own errors


def run_cli(main: Callable[[], int | None]) -> None:
    """Run an entry point; whatever its user can cause is one line on stderr, not a traceback.

    Exit codes: 2 for a `UserError` or a file that cannot be used, 1 for a `FeatureError`, 130 for
    Ctrl-C, 141 for a closed pipe.
    """
    try:
        code = main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except FeatureError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except BrokenPipeError:  # the reader of a pipe left, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except OSError as error:
        if error.filename is None and error.errno not in _FULL:
            raise  # nothing the user could look for: keep the traceback
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"error: {where}{error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    raise SystemExit(code or 0)
