#!/usr/bin/env bash
# The headline run: five targets feed three drafters on the eight GPUs of one machine.
#   bash runs/eight_gpu.sh --target.path DIR_OR_HUB_ID --data.train STORE_OR_JSONL --run.dir runs/NAME
# A later option wins: `--targets 6 --drafters 2`, `--run.resume auto`, `--batch.draws 2`, ...
# Over several machines, all with the run folder and the data on a file system they share, each says
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 bash runs/eight_gpu.sh --targets 10 --drafters 6 ...
# What it reaches on this machine, with random weights and tokens: benchmarks/pipeline_gpu.sh headline
set -euo pipefail
if [ "${NNODES:-1}" -gt 1 ]; then
  exec torchrun --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "${NPROC:-8}" \
    --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" \
    -m dflash_ext.train eight_gpu "$@"
fi
exec python -m dflash_ext.train eight_gpu "$@"
