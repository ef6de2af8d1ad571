#!/usr/bin/env bash
# The pipeline on two GPUs: 1:1 over NCCL with a Qwen3-8B-shaped target, 5:3 as eight processes.
# Usage: OUT=DIR bash benchmarks/pipeline_gpu.sh [options of `python -m dflash_ext.bench.pipeline`]
# On a CPU: DFLASH_SKIP_BUILD=1 ... --shape tiny --token-budget 512 --steps 40 --device cpu
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-benchmarks}
name=pipeline_cpu
if command -v nvidia-smi > /dev/null; then
  name=pipeline_h200x$(nvidia-smi -L | wc -l)
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
fi
if [ -z "${DFLASH_SKIP_BUILD:-}" ]; then
  DFLASH_SM=${DFLASH_SM:-90} python3 -m pip install --no-build-isolation --no-deps --no-index -e . \
    > "$out/pipeline_build.log" 2>&1 || { tail -40 "$out/pipeline_build.log"; exit 1; }
fi
python3 -m dflash_ext.bench.pipeline --json "$out/$name.json" "$@" 2>&1 | tee "$out/$name.log"
