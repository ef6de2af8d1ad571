#!/usr/bin/env bash
# The quickstart: a real small target, its own conversations, a trained and evaluated drafter.
set -euo pipefail
exec python -m dflash_ext.train "$@"
