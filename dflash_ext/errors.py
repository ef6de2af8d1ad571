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
        if error.filename is None:  # nothing the user could look for: keep the traceback
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    raise SystemExit(code or 0)
