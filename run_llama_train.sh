#!/usr/bin/env bash
# Train: set up on first use, check the configuration, then torchrun (or plain Python for one rank) on train.py.
#
#   ./run_llama_train.sh                                                  # train_configs/llama_debug.toml
#   NGPU=2 ./run_llama_train.sh --training.steps 20                       # two ranks: GPUs, or processes on a CPU
#   CONFIG_FILE=train_configs/llama3_8b.toml NGPU=8 ./run_llama_train.sh  # any key of the TOML can follow
#   NGPU=8 NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 ./run_llama_train.sh    # on each of two machines, with its NODE_RANK
#
# Variables: NGPU (1), CONFIG_FILE, LOG_RANK (0), NNODES (1), NODE_RANK, MASTER_ADDR, MASTER_PORT (29500).
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
python="$("$root/setup_env.sh")"
exec "$python" "$root/ablation_train.py" "$@"
