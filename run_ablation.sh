#!/usr/bin/env bash
# Run every arm and seed of an ablation, interleaved and resumable, then write its report.
#
#   ./run_ablation.sh learning_rate                       # a file of train_configs/ablations/, or a path
#   NGPU=2 ./run_ablation.sh ddp_vs_fsdp2                 # two ranks a run
#   ./run_ablation.sh learning_rate --dry_run             # runs, states and commands; also --arms a,b  --seeds 1,2  --new
#   ./run_ablation.sh learning_rate --training.steps 300  # any key, for every arm
#
# The same command after an interruption continues.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
python="$("$root/setup_env.sh")"
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m ablation run "$@"
