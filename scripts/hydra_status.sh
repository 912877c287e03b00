#!/usr/bin/env bash
# Print PENDING, RUNNING or DONE for each label shard, and the load of the GPUs, if there are any.
set -euo pipefail
# shellcheck source=scripts/hydra_env.sh
source "$(dirname "$0")/hydra_env.sh"

run_nmoe hydra status --labels "$LABELS_DIR" --slices "$SLICES_DIR" "$@"
run_on nvidia-smi --query-gpu=index,utilization.gpu,memory.used --format=csv 2>/dev/null || true
