#!/usr/bin/env bash
# A real drafter from nothing but packages, on one large GPU: the small target writes 24,000
# conversations, a drafter is trained on them for 2,400 steps and evaluated.
#   bash runs/real_result.sh [RUN_FOLDER [options of dflash_ext.train]]
# EVALUATE="--limit 4 --batch 4": options of dflash_ext.evaluate
set -euo pipefail
run=${1:-runs/real_result}
[ $# -eq 0 ] || shift
python3 -m dflash_ext.train one_gpu --run.dir "$run" --data.synthetic-rows 24000 --steps 2400 \
  --eval.prompts-per-set 0 "$@"
python3 -m dflash_ext.bench runs "$run" --json "$run/training.json" --png "$run/training.png"
# shellcheck disable=SC2086
python3 -m dflash_ext.evaluate "$run" --prompts humaneval gsm8k mtbench --limit 40 \
  --max-new-tokens 256 --batch 40 --json "$run/evaluation.json" --png "$run/evaluation.png" ${EVALUATE:-}
