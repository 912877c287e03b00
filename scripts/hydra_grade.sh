#!/usr/bin/env bash
# Grade the documents of a slice (INPUT_DOCIDS, by default the test split) with trained, calibrated
# heads. Takes the arguments of `nmoe hydra grade`. Writes quality_scores.jsonl and summary.json to
# OUT_DIR.
set -euo pipefail
# shellcheck source=scripts/hydra_env.sh
source "$(dirname "$0")/hydra_env.sh"
HEADS_DIR="${HEADS_DIR:-/checkpoints/hydra_20b_v1}"
OUT_DIR="${OUT_DIR:-$LABELS_ROOT/quality_$ORACLE_RUN_ID/test}"

run_nmoe hydra grade \
  --input-docids "${INPUT_DOCIDS:-$SLICES_DIR/docids_test.jsonl}" --data-root "$DATA_ROOT" \
  --checkpoint "$CKPT_20B" --heads-dir "$HEADS_DIR" --calibration "$CAL_DIR" --out "$OUT_DIR" "$@"
