#!/usr/bin/env bash
# Everything that needs a GPU, for a machine with torch and no network: build, tests, benchmarks.
# Usage: bash benchmarks/gpu.sh [tests] [attention] [vocabulary] [launch] [fused] [step] [target]
#   [sanitizer] [ncu] [real_result]
# Results go to $OUT (default: here). Every line is in $OUT/gpu.log as it is printed, so a time limit
# loses nothing; a failing step costs the script's exit code, not the steps after it.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-benchmarks}
failed=()

step() { # NAME SECONDS COMMAND...: run it, say how long it took, remember a failure
  local name=$1 limit=$2 begin=$SECONDS code=0
  shift 2
  timeout "$limit" "$@" || code=$?
  echo "--- $name: exit code $code, $((SECONDS - begin)) s"
  [ "$code" -eq 0 ] || failed+=("$name")
}

tool() { # NAME: its path, from PATH, a CUDA toolkit or an NVIDIA wheel; empty, and said, without it
  local path site
  site=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  path=$(command -v "$1" || ls /usr/local/cuda*/bin/"$1" /opt/nvidia/nsight-compute/*/"$1" \
    "$site"/nvidia/*/bin/"$1" 2> /dev/null | sort | tail -1)
  if [ -z "$path" ]; then
    echo "$1 is not on this machine: nothing was checked" >&2
  fi
  echo "$path"
}

profile() { # NCU OPTION...: every attention kernel of one forward and backward
  local path=$1
  shift
  step "ncu $*" 120 "$path" --clock-control none --kernel-name "regex:^(attention|hopper)_" \
    --section SpeedOfLight --section LaunchStats --section Occupancy --section WarpStateStats \
    python3 -m dflash_ext.bench once "$@"
}

build() {
  local log begin=$SECONDS
  log=$(mktemp)
  nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.draw --format=csv,noheader
  DFLASH_SM=${DFLASH_SM:-90} python3 -m pip install --no-build-isolation --no-deps --no-index \
    -e . -v > "$log" 2>&1 || { tail -60 "$log"; exit 1; }
  grep -E "images for sm|MiB in" "$log"
  echo "--- build: $((SECONDS - begin)) s"
  python3 -c "from dflash_ext import _C; print(_C.describe_device(0))"
}

run_step() {
  local path check run
  case $1 in
    tests) # of the files that have such tests: others import what that machine lacks; and what
      # only its CPU can run, the AVX-512 unit
      # shellcheck disable=SC2046
      step tests 420 python3 -m pytest -q -m gpu $(grep -l mark.gpu tests/test_*.py)
      step cpu_tests 120 python3 -m pytest -q tests/test_attention_cpu.py ;;
    attention)
      # shellcheck disable=SC2086
      step attention 360 python3 -m dflash_ext.bench attention --json "$out/attention_h200.json" \
        ${ATTENTION_OPTIONS:-}
      step picture 60 python3 -m dflash_ext.bench plot "$out/attention_h200.json" \
        "$out/attention_h200.png" ;;
    vocabulary)
      step vocabulary 240 python3 -m dflash_ext.bench vocabulary --json "$out/vocabulary_h200.json" ;;
    launch) step launch 60 python3 -m dflash_ext.bench launch --json "$out/launch_h200.json" ;;
    fused) step fused 120 python3 -m dflash_ext.bench fused --json "$out/fused_h200.json" ;;
    step) # the composition beside it compiles flex_attention once a batch
      # shellcheck disable=SC2086
      step step "${STEP_SECONDS:-400}" python3 -m dflash_ext.bench step \
        --json "$out/step_h200.json" ${STEP_OPTIONS:-} ;;
    target) # beside plain transformers; TARGET_OPTIONS="--shapes qwen3-8b" for that alone
      # shellcheck disable=SC2086
      step target "${TARGET_SECONDS:-240}" python3 -m dflash_ext.bench target \
        --json "$out/target_h200.json" ${TARGET_OPTIONS:-} ;;
    sanitizer) # small problems only: a checked kernel runs one to two orders slower
      path=$(tool compute-sanitizer)
      [ -n "$path" ] || { failed+=(sanitizer); return; }
      # torch's caching allocator would hide an access past a tensor's end inside its pool
      export PYTORCH_NO_CUDA_MEMORY_CACHING=1
      # Of our kernels; the launcher probes, so no API errors. racecheck before 2026.3 reports what is
      # none on Hopper, and aborts (docs/kernel_notes.md): SANITIZER_CHECKS="memcheck racecheck"
      for check in ${SANITIZER_CHECKS:-memcheck}; do
        step "$check" "${SANITIZER_SECONDS:-240}" "$path" --tool "$check" --error-exitcode 9 \
          --report-api-errors no --kernel-name kns=attention_,kns=hopper_ \
          python3 -m pytest -q -x -p no:cacheprovider -m gpu tests/test_attention_gpu.py \
          tests/test_attention_kept.py -k "${SANITIZER_TESTS:-test_numerics or test_kept_and}"
        step "$check of row-wise kernels" 120 "$path" --tool "$check" --error-exitcode 9 \
          --report-api-errors no --kernel-name kns=rms_norm_,kns=swiglu_,kns=head_norm_ \
          python3 -m pytest -q -x -p no:cacheprovider -m gpu tests/test_fused_gpu.py \
          -k "in_place or 128-15-9"
        step "$check of the vocabulary loss" 120 "$path" --tool "$check" --error-exitcode 9 \
          --report-api-errors no --kernel-name kns=vocabulary_ \
          python3 -m pytest -q -x -p no:cacheprovider -m gpu tests/test_vocabulary_gpu.py -k 12345
      done
      unset PYTORCH_NO_CUDA_MEMORY_CACHING ;;
    ncu) # once per kernel: the operator's path and plain Triton's, dS kept and recomputed
      path=$(tool ncu)
      [ -n "$path" ] || { failed+=(ncu); return; }
      profile "$path" --shape A
      profile "$path" --shape A --path triton
      profile "$path" --shape A --recompute
      profile "$path" --shape A --path triton --recompute
      profile "$path" --shape "D 256" ;;
    real_result) # needs the small target's wheel: see PIP_FIND_LINKS in pip's manual
      run=${RUN_DIR:-/tmp/real_result}
      # 14 minutes: more than one call of some machines, so in the background there
      step real_result "${REAL_RESULT_SECONDS:-1500}" bash runs/real_result.sh "$run"
      [[ " ${failed[*]} " == *" real_result "* ]] || for part in training evaluation; do
        cp "$run/$part.json" "$out/${part}_h200.json"
        cp "$run/$part.png" "$out/${part}_h200.png"
      done ;;
    *) echo "unknown step $1"; failed+=("$1") ;;
  esac
}

main() {
  local name
  build
  for name in "$@"; do
    echo "=== $name"
    run_step "$name"
  done
  nvidia-smi --query-gpu=clocks.sm,power.draw --format=csv,noheader
  [ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; return 1; }
}

export PYTHONUNBUFFERED=1
main "$@" 2>&1 | tee "$out/gpu.log"
exit "${PIPESTATUS[0]}"
