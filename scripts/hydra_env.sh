# shellcheck shell=bash
# Variables and functions that the hydra scripts share; source this file, do not run it.
#
# DATA_ROOT      token shards                     SLICES_ID      folder of the docid slices
# CKPT_120B      the oracle's weights             ORACLE_RUN_ID  folder of the oracle's labels
# CKPT_20B       the backbone's weights           LABELS_ROOT    directory of both folders
# CAL_DIR        calibration                      OUT_DIR        output of the last stages
# POD            run in this Kubernetes pod       LOCAL=1        run here even if POD is set

DATA_ROOT="${DATA_ROOT:-/data}"
LABELS_ROOT="${LABELS_ROOT:-/labels}"
SLICES_ID="${SLICES_ID:-slices}"
ORACLE_RUN_ID="${ORACLE_RUN_ID:-oracle_120b_v1}"
CKPT_120B="${CKPT_120B:-/data/models/gpt-oss-120b}"
CKPT_20B="${CKPT_20B:-/data/models/gpt-oss-20b}"
SLICES_DIR="$LABELS_ROOT/$SLICES_ID"
LABELS_DIR="$LABELS_ROOT/$ORACLE_RUN_ID"
CAL_DIR="${CAL_DIR:-$LABELS_ROOT/calibration_$ORACLE_RUN_ID}"
NMOE="${NMOE:-nmoe}"
export DATA_ROOT SLICES_DIR LABELS_DIR CKPT_120B CKPT_20B CAL_DIR

# run_on [NAME=VALUE ...] COMMAND ...: run it in the pod if POD is set, else here.
run_on() {
  if [ -n "${POD:-}" ] && [ "${LOCAL:-0}" != 1 ]; then
    kubectl exec "$POD" -- env "$@"
  else
    env "$@"
  fi
}

run_nmoe() {
  run_on "$NMOE" "$@"
}
