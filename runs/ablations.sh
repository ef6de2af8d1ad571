#!/usr/bin/env bash
# Ways to train the quickstart's drafter, each for as many steps, on the same conversations.
#   bash runs/ablations.sh FOLDER STEPS "base adamw dpace ..." [options of dflash_ext.train]
# ends with one table of held-out accepted lengths, FOLDER/ablations.json and FOLDER/ablations.png.
set -euo pipefail
folder=$1 steps=$2 names=$3
shift 3
way() {
  case $1 in
    base) ;;
    random_init) echo --drafter.init random ;;
    adamw) echo --optim.name adamw ;;
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
    *) echo "unknown way '$1'" >&2; return 1 ;;
  esac
}
for name in $names; do way "$name" > /dev/null; done # a wrong name costs no run
mkdir -p "$folder"
runs=()
for name in $names; do
  options=$(way "$name")
  runs+=("$folder/$name")
  # shellcheck disable=SC2086
  python3 -m dflash_ext.train one_gpu --run.dir "$folder/$name" --steps "$steps" \
    --eval.prompts-per-set 0 --eval.every "$((steps > 8 ? steps / 8 : 1))" \
    --run.checkpoint-every 1000000 --run.no-export $options "$@" > "$folder/$name.log" 2>&1 ||
    { tail -5 "$folder/$name.log"; exit 1; }
  python3 -m dflash_ext.bench runs "${runs[@]}" --json "$folder/ablations.json" \
    --png "$folder/ablations.png" | tail -1
done
python3 -m dflash_ext.bench runs "${runs[@]}"
