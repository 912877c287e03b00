#!/usr/bin/env bash
# List the documents of all sources by split, and divide train and val into eight shards each.
set -euo pipefail
# shellcheck source=scripts/hydra_env.sh
source "$(dirname "$0")/hydra_env.sh"

run_nmoe hydra slices --data-root "$DATA_ROOT" --out "$SLICES_DIR" "$@"
