#!/usr/bin/env bash
# Merge the labels of each split, then calibrate: on the scores of the heads in HEADS_DIR if they are
# trained already, else by the published rule on labels alone (run again after training).
# Takes the arguments of `nmoe hydra calibrate`. Writes $CAL_DIR/calibration_summary.json.
set -euo pipefail
# shellcheck source=scripts/hydra_env.sh
source "$(dirname "$0")/hydra_env.sh"
HEADS_DIR="${HEADS_DIR:-/checkpoints/hydra_20b_v1}"

run_nmoe hydra merge-labels --labels "$LABELS_DIR"
labels=(--labels "$LABELS_DIR/merged/labels_val.jsonl" --out "$CAL_DIR")
if run_on test -f "$HEADS_DIR/hydra_judge.safetensors"; then
  run_nmoe hydra calibrate "${labels[@]}" --heads-dir "$HEADS_DIR" \
    --checkpoint "$CKPT_20B" --data-root "$DATA_ROOT" "$@"
else
  echo "no heads in $HEADS_DIR yet: calibrating on labels alone; run again after training" >&2
  run_nmoe hydra calibrate "${labels[@]}" --compat "$@"
fi
