#!/usr/bin/env bash
# An ablation as a SLURM job array, one task a run, then a job that writes the report. Submit it by calling it:
#
#   NGPU=8 ablation/slurm_array.sh load_balance --gres=gpu:8 --time=1:00:00    # what follows the name goes to sbatch
#
# Tasks start in the plan's interleaved order and skip what is done; a last job runs what is still missing and writes the
# report. THROTTLE tasks run at once (1): one at a time on one node (--nodelist=...) keeps the comparison paired; several
# hosts make it unpaired, which the report says.
#SBATCH --job-name=ablation
#SBATCH --output=slurm-%x-%A_%a.out
#SBATCH --nodes=1
#SBATCH --ntasks=1
set -euo pipefail

if [[ -z "${ABLATION_NAME:-}" ]]; then
    name="${1:?usage: [NGPU=n] ablation/slurm_array.sh NAME [sbatch options]}"
    shift
    self="$(realpath "${BASH_SOURCE[0]}")"
    root="$(dirname "$(dirname "$self")")"
    python="$("$root/setup_env.sh")"
    export ABLATION_NAME="$name" ABLATION_ROOT="$root" NGPU="${NGPU:-1}"
    count="$(PYTHONPATH="$root" "$python" -m ablation run "$name" --count)"
    array="$(sbatch --parsable --array="1-$count%${THROTTLE:-1}" "$@" "$self")"
    report="$(sbatch --parsable --dependency="afterany:${array%%;*}" "$@" "$self")"
    echo "submitted $count runs of $name as job ${array%%;*}, its report as job ${report%%;*}"
    exit
fi

python="$("$ABLATION_ROOT/setup_env.sh")"
export PYTHONPATH="$ABLATION_ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m ablation run "$ABLATION_NAME" ${SLURM_ARRAY_TASK_ID:+--only "$SLURM_ARRAY_TASK_ID"}
