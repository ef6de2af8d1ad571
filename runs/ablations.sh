#!/usr/bin/env bash
# Ways to train the quickstart's drafter, each for as many steps, on the same conversations.
#   JOBS=4 bash runs/ablations.sh FOLDER STEPS "base dpace random_init+dpace ..." [options of train]
# `base` is the plain way, the target's layers and cross-entropy; each other is on top of it. JOBS at a
# time, spread over the GPUs (one such run is limited by its host, so several fit one GPU). Ends with
# one table of held-out accepted lengths, FOLDER/ablations.json and FOLDER/ablations.png; a run that
# fails costs the exit code, not the others.
set -euo pipefail
folder=$1 steps=$2 names=$3
shift 3
mapfile -t gpus < <(nvidia-smi --query-gpu=index --format=csv,noheader 2> /dev/null || true)
[ -z "${CUDA_VISIBLE_DEVICES:-}" ] || IFS=, read -ra gpus <<< "$CUDA_VISIBLE_DEVICES"

options_of() { # WAY[+WAY...]; of an option given twice the last counts
  local part
  echo --drafter.init target --loss.kind ce
  for part in ${1//+/ }; do
    case $part in
      base) ;;
      random_init) echo --drafter.init random ;;
      adamw) echo --optim.name adamw ;;
      lr_half) echo --optim.lr 0.01 ;;
      lr_double) echo --optim.lr 0.04 ;;
      no_decay) echo --loss.gamma none ;;
      dpace) echo --loss.kind dpace ;;
      kl) echo --loss.kind kl ;;
      lk) echo --loss.kind lk ;;
      scattered) echo --loss.no-contiguous ;;
      anchors_16) echo --batch.anchors-per-sequence 16 ;;
      anchors_128) echo --batch.anchors-per-sequence 128 --batch.anchor-budget 4096 ;;
      two_draws) echo --batch.draws 2 ;;
      block_16) echo --drafter.block-size 16 ;;
      fp8_head) echo --loss.fp8-head ;;
      layers_3) echo --drafter.num-layers 3 ;;
      seed_1) echo --seed 1 ;; # also other conversations, which it makes itself
      *) echo "unknown way '$part'" >&2; return 1 ;;
    esac
  done
}

train() { # NUMBER NAME [options]
  local number=$1 name=$2
  shift 2
  [ ${#gpus[@]} -eq 0 ] || export CUDA_VISIBLE_DEVICES=${gpus[number % ${#gpus[@]}]}
  # shellcheck disable=SC2046
  python3 -m dflash_ext.train one_gpu --run.dir "$folder/$name" --steps "$steps" \
    --eval.prompts-per-set 0 --eval.every "$((steps > 8 ? steps / 8 : 1))" \
    --run.checkpoint-every 1000000 --run.no-export $(options_of "$name") "$@" \
    > "$folder/$name.log" 2>&1 || { echo "$name: $(tail -1 "$folder/$name.log")"; return 1; }
}

for name in $names; do options_of "$name" > /dev/null; done # a wrong name costs no run
mkdir -p "$folder"
pids=() failed=0
for name in $names; do
  while [ "$(jobs -rp | wc -l)" -ge "${JOBS:-1}" ]; do wait -n || true; done
  train "${#pids[@]}" "$name" "$@" &
  pids+=($!)
  # The first makes the conversations for all: the others begin when it trains, or has failed.
  while [ ${#pids[@]} -eq 1 ] && [ ! -s "$folder/$name/metrics.jsonl" ] && kill -0 $! 2> /dev/null; do
    sleep 1
  done
done
for pid in ${pids[@]+"${pids[@]}"}; do wait "$pid" || failed=1; done
runs=()
for name in $names; do
  if grep -qs '"kind": "validation"' "$folder/$name/metrics.jsonl"; then runs+=("$folder/$name"); fi
done
python3 -m dflash_ext.bench runs "${runs[@]}" --json "$folder/ablations.json" \
  --png "$folder/ablations.png"
exit "$failed"
