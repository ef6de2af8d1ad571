#!/usr/bin/env bash
# The pipeline on two GPUs or more, for a machine with torch and no network.
# Usage: OUT=DIR bash benchmarks/pipeline_gpu.sh [tests] [one_to_one] [five_to_three] [headline] [sweep]
#   tests          tests/test_pipeline_gpu.py: NCCL to the bit like one process, more ranks than GPUs
#   one_to_one     1:1 over NCCL with a Qwen3-8B-shaped target: pace and memory
#   five_to_three  eight processes over gloo on the GPUs, and on the CPU
#   headline       the recipe eight_gpu, 5:3 (OPTIONS='--targets 2 --drafters 2': on four GPUs, ...)
#   sweep          runs/sweep.sh with that recipe: SPLITS (default "5:3 2:6"), two minutes each;
#                  OPTIONS are then those of dflash_ext.train, INPUTS those of the data's making
# The headline takes two calls, the second of which keeps what the first one found if that is there:
#   OPTIONS='--headline-pieces alone pace' OUT=$OUT bash benchmarks/pipeline_gpu.sh headline
#   cp benchmarks/pipeline_h200x8_headline.json $OUT; LIMIT=510 DFLASH_SKIP_BUILD=1 \
#     OPTIONS='--headline-pieces kills losses' OUT=$OUT bash benchmarks/pipeline_gpu.sh headline
# (between them, that file was copied from what the first call left in its $OUT).
# OPTIONS: of `python -m dflash_ext.bench pipeline`; LIMIT: seconds for each step (default 480), after
# which it has 80 more to save what it has: one step is one call of a machine that allows ten
# minutes. Each step writes a file of its own, every line is in $OUT/pipeline.log as it is printed,
# and a step that fails leaves its metrics there too: it costs the exit code, not what is known.
# On a CPU: DFLASH_SKIP_BUILD=1 OPTIONS='--shape tiny --device cpu --token-budget 512 --steps 40 \
#   --alone-batches 10' OUT=/tmp bash benchmarks/pipeline_gpu.sh one_to_one five_to_three
# and the headline in a minute: OPTIONS='--shape tiny --device cpu --layers 1 --token-budget 192 \
#   --anchors-per-sequence 4 --anchor-budget 64 --block-size 4 --steps 14'
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-benchmarks}
gpus=$(nvidia-smi -L 2> /dev/null | wc -l)
name=pipeline_cpu
[ "$gpus" -gt 0 ] && name=pipeline_h200x$gpus
work=${WORK:-/tmp/dflash-pipeline}
failed=()

step() { # NAME COMMAND...: run it within the limit, say how long it took, remember a failure
  local step=$1 begin=$SECONDS code=0
  shift
  echo "=== $step"
  timeout --foreground -s INT -k 80 "${LIMIT:-480}" "$@" || code=$?
  echo "--- $step: exit code $code, $((SECONDS - begin)) s"
  [ "$code" -eq 0 ] && return
  failed+=("$step")
  local metrics
  find "$work/$step" -name metrics.jsonl 2> /dev/null | while read -r metrics; do
    cp "$metrics" "$out/${name}_$(tr / _ <<< "${metrics#"$work/"}")"
  done
}

look() { # what a failure would turn on, before anything is paid for
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  nvidia-smi topo -m
  df -h /dev/shm /tmp | cat
  env | grep -E '^(NCCL|TORCH|CUDA)' # NVLink multicast must stay off on a lent machine
  python3 - << 'PY' || exit 1
import torch, transformers
import numpy, rich, safetensors, tyro  # a wheel of tyro is not part of every image
count = torch.cuda.device_count()
print("torch", torch.__version__, "transformers", transformers.__version__, "NCCL", torch.cuda.nccl.version())
print(count, "GPUs, peer access:", count > 1 and torch.cuda.can_device_access_peer(0, 1))
PY
}

build() {
  local log begin=$SECONDS
  log=$(mktemp)
  DFLASH_SM=${DFLASH_SM:-90} python3 -m pip install --no-build-isolation --no-deps --no-index \
    -e . > "$log" 2>&1 || { tail -60 "$log"; exit 1; }
  echo "--- build: $((SECONDS - begin)) s"
}

main() {
  local part
  [ "$gpus" -gt 0 ] && look
  [ -n "${DFLASH_SKIP_BUILD:-}" ] || build
  [ $# -gt 0 ] || set -- tests one_to_one five_to_three
  for part in "$@"; do
    case $part in
      tests) step tests python3 -m pytest -v --durations=0 -m gpu tests/test_pipeline_gpu.py ;;
      one_to_one | five_to_three | headline)
        # shellcheck disable=SC2086
        step "$part" python3 -m dflash_ext.bench pipeline --parts "$part" \
          --work "$work" --json "$out/${name}_$part.json" ${OPTIONS:-} ;;
      sweep) # the headline's own target and data, made by no piece of it
        # shellcheck disable=SC2086
        step sweep_inputs python3 -m dflash_ext.bench pipeline --parts headline --headline-pieces \
          --work "$work/sweep" --json "$work/sweep_inputs.json" ${INPUTS:-}
        # shellcheck disable=SC2086
        [ ${#failed[@]} -gt 0 ] || step sweep bash runs/sweep.sh "$work/sweep/runs" 12 "${SPLITS:-5:3 2:6}" eight_gpu \
          --target.path "$work/sweep/headline/target" --target.random-weights \
          --target.mask-token-id 151935 --data.train "$work/sweep/headline/store" ${OPTIONS:-} ;;
      *) echo "unknown step $part"; failed+=("$part") ;;
    esac
  done
  [ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; return 1; }
}

export PYTHONUNBUFFERED=1
mkdir -p "$out"
main "$@" 2>&1 | tee -a "$out/pipeline.log"
exit "${PIPESTATUS[0]}"
