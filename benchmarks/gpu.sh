#!/usr/bin/env bash
# Everything that needs a GPU, for a machine with torch and no network: build, tests, benchmarks.
# Usage: bash benchmarks/gpu.sh [tests] [attention] [quickstart]; results go to $OUT (default: here).
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-benchmarks}
nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.draw --format=csv,noheader
DFLASH_SM=${DFLASH_SM:-90} python3 -m pip install --no-build-isolation --no-deps --no-index -e . -v \
  > "$out/build.log" 2>&1 || { tail -40 "$out/build.log"; exit 1; }
grep -E "images for sm|MiB in" "$out/build.log"
python3 -c "from dflash_ext import _C; print(_C.describe_device(0))"
for step in "$@"; do
  echo "=== $step"
  case $step in
    tests) # the second line runs what only this machine's CPU can: the AVX-512 unit
      python3 -m pytest -q -m gpu tests 2>&1 | tee "$out/gpu_tests.log" | tail -25
      python3 -m pytest -q tests/test_attention_cpu.py 2>&1 | tee "$out/cpu_tests.log" | tail -4 ;;
    attention) python3 -m dflash_ext.bench attention --flex --json "$out/attention_h200.json" ;;
    quickstart) # needs the small target's wheel: see PIP_FIND_LINKS in pip's manual
      PYTHONUNBUFFERED=1 python3 -m dflash_ext.train one_gpu --run.dir "${RUN_DIR:-/tmp/quickstart}" ${QUICKSTART_OPTIONS:-}
      cp "${RUN_DIR:-/tmp/quickstart}/results.json" "$out/quickstart_h200.json"
      cp "${RUN_DIR:-/tmp/quickstart}/metrics.jsonl" "$out/quickstart_h200_metrics.jsonl" ;;
    *) echo "unknown step $step"; exit 2 ;;
  esac
done
