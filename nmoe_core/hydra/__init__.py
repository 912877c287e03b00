"""Quality grading: slices of documents, oracle labels, heads over a frozen backbone, decisions.

The stages run in this order and meet in files only: `slices`, `labels` (with an oracle), `train`
(probe and judge), `calibrate`, `grade`. torch is imported by `features`, `heads`, `head_files`,
`scoring`, `train`, `calibrate`, `convert` and `grade`, and by nothing else here.
"""
