#!/usr/bin/env bash
exec "$(dirname "${BASH_SOURCE[0]}")/../../run_ablation.sh" "${BASH_SOURCE[0]%.sh}.toml" "$@"
