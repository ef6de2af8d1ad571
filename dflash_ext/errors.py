"""Errors a user can cause and mend. Entry points print them as one line and exit with code 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


class UserError(ValueError):
    """Wrong input: one line says what was wrong, what was expected and what to do."""


class FeatureError(RuntimeError):
    """A feature batch does not match the tokens it is said to belong to; never train on it."""


def run_cli(main: Callable[[], int | None]) -> None:
    """Run an entry point: a `UserError` becomes one line on stderr and exit code 2, Ctrl-C 130."""
    try:
        code = main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:  # the reader of a pipe left, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    raise SystemExit(code or 0)
