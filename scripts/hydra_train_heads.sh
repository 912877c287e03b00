#!/usr/bin/env bash
# Train the probe on GPU 0 and the judge on GPU 1, at once, over the frozen backbone. Resumes an
# interrupted training; skips finished heads of the same inputs.
# Takes the arguments of both `nmoe train` verbs. Writes the heads to OUT_DIR.
set -euo pipefail
# shellcheck source=scripts/hydra_env.sh
source "$(dirname "$0")/hydra_env.sh"
OUT_DIR="${OUT_DIR:-${HEADS_DIR:-/checkpoints/hydra_20b_v1}}"

train() { # head, GPU, further arguments
  run_on "CUDA_VISIBLE_DEVICES=$2" "$NMOE" train "$1" \
    --labels "$LABELS_DIR/merged/labels_train.jsonl" \
    --labels-val "$LABELS_DIR/merged/labels_val.jsonl" \
    --checkpoint "$CKPT_20B" --data-root "$DATA_ROOT" --out "$OUT_DIR" "${@:3}"
}

train probe 0 "$@" &
probe=$!
failed=0
train judge 1 "$@" || failed=1
wait "$probe" || failed=1
exit "$failed"
