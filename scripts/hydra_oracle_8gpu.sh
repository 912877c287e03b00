#!/usr/bin/env bash
# Label train, val and test shard i on GPU i, eight at once. Skips finished shards and resumes others.
# Takes the arguments of `nmoe hydra oracle-label`. Fails if a shard fails.
set -euo pipefail
# shellcheck source=scripts/hydra_env.sh
source "$(dirname "$0")/hydra_env.sh"
LOG_DIR="${LOG_DIR:-/tmp}"

label() { # split, shard, further arguments
  run_on "CUDA_VISIBLE_DEVICES=$2" "$NMOE" hydra oracle-label \
    --input-docids "$SLICES_DIR/$1_shard_0$2" --data-root "$DATA_ROOT" \
    --checkpoint "$CKPT_120B" --out "$LABELS_DIR/$1/shard_$2" "${@:3}" \
    >"$LOG_DIR/oracle_$1_${ORACLE_RUN_ID}_$2.log" 2>&1
}

workers=()
for gpu in 0 1 2 3 4 5 6 7; do
  { label train "$gpu" "$@" && label val "$gpu" "$@" && label test "$gpu" "$@"; } &
  workers+=("$!")
done
failed=0
for gpu in "${!workers[@]}"; do
  if ! wait "${workers[$gpu]}"; then
    echo "shard $gpu failed: see $LOG_DIR/oracle_*_${ORACLE_RUN_ID}_$gpu.log" >&2
    failed=1
  fi
done
exit "$failed"
