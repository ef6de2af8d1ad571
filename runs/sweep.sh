#!/usr/bin/env bash
# How many targets and drafters? A short run of each split, and one line of numbers for each.
#   bash runs/sweep.sh FOLDER STEPS "7:1 6:2 5:3 4:4 3:5" RECIPE [options of dflash_ext.train]
# With `--target.random-weights` the shape of a target is enough. A split that fails costs the exit
# code, not the others. What a run saved, gigabytes, is removed once its line is printed.
set -euo pipefail
code=0
folder=$1 steps=$2 splits=$3 recipe=$4
shift 4
paces() { # SPLIT METRICS: its line
  python3 - "$@" << 'PY'
import json, statistics, sys
records = [json.loads(line) for line in open(sys.argv[2])]
steady = [r for r in records if r["kind"] == "train"][3:]
if len(steady) < 2:
    sys.exit(f"{sys.argv[1]}: STEPS are too few, 3 warm up and 2 are timed")
seconds = steady[-1]["time"] - steady[0]["time"]
print(sys.argv[1], "targets:drafters", f"{sum(r['ktok_s'] * r['seconds'] for r in steady[1:]) / seconds:.2f} Ktok/s",
      *(f"{name} {statistics.mean(r[name] for r in steady):.2f}"
        for name in ("wait_target", "wait_drafter", "wait_transfer", "mfu_target", "mfu_drafter") if name in steady[0]),
      "limit:", statistics.mode(r["limit"] for r in steady))
PY
}

mkdir -p "$folder"
for split in $splits; do
  run=$folder/${split/:/-to-}
  if python3 -m dflash_ext.train "$recipe" --targets "${split%:*}" --drafters "${split#*:}" \
    --run.dir "$run" --steps "$steps" --epochs None --eval.prompts-per-set 0 --eval.every 0 \
    --run.checkpoint-every 1000000 --run.no-export "$@" > "$run.log" 2>&1; then
    paces "$split" "$run/metrics.jsonl" || code=1
  else
    echo "$split failed:"
    tail -5 "$run.log"
    code=1
  fi
  rm -rf "$run/checkpoints" "$run/best"
done
exit $code
