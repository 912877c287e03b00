"""The card of a head: what its header says, as a page for people, beside the head's file."""

from __future__ import annotations

from typing import Any

from nmoe_core.labels.scores import DIMENSIONS


def head_card(name: str, digest: str, header: dict[str, Any]) -> str:
    """Markdown of what the head is, what it was made from, and how well it agrees on val.

    Args:
        name: File name of the head.
        digest: SHA-256 of the file.
        header: The file's header.
    """
    backbone, training = header["backbone"], header["training"]
    facts = {
        "file": f"{name}, SHA-256 {digest}",
        "arch": ", ".join(f"{key} {value}" for key, value in header["arch"].items())
        if "arch" in header
        else "see the file's header",
        "reads": f"the residual after block {header['tap']} of {backbone['num_hidden_layers']}, "
        f"the first {header['max_ctx']} tokens of a document",
        "backbone": backbone["digest"],
        "oracle": f"{header['scorer_model']} {header['scorer_version']}, "
        f"rubric {header['rubric_hash']}",
        "labels": f"{training['num_documents']} documents, "
        f"{training.get('num_salvaged_left_out', 0)} salvaged ones left out, "
        f"SHA-256 {header['labels_digest']}",
        "training": f"{training['num_steps']} steps, settings {header['settings']}",
    }
    lines = [f"# {name}", "", *(f"* {key}: {value}" for key, value in facts.items())]
    lines += ["", "## Val", "", *_metrics(header["metrics"], "val")]
    lines += ["", "## Test: only reported, never used to fit, choose or promote", ""]
    return "\n".join([*lines, *_metrics(header.get("test_metrics") or {}, "test"), ""])


def _metrics(metrics: dict[str, Any], split: str) -> list[str]:
    if not metrics:
        none = "" if split == "val" else " No figure exists of documents that are untouched."
        return [f"No {split} labels: agreement was not measured.{none}"]
    seen, again = metrics.get("num_trained_on"), metrics.get("num_repeated")
    lines = [
        f"Agreement with the oracle on {metrics['n']} {split} documents; 95 % bootstrap intervals.",
        f"Left out: {seen} whose content was used before, {again} that repeat another's."
        if seen is not None
        else "Documents whose content was trained on are among them.",
        "",
        "| score | Spearman | within source | MAE | R2 | QWK |",
        "|---|---|---|---|---|---|",
    ]
    for name in DIMENSIONS:
        row, own = metrics["dimensions"][name], (metrics[k][name] for k in ("mae", "r2", "qwk"))
        lines.append(_line(name, row, *own))
    aggregate = (metrics["mae_aggregate"], metrics["r2_aggregate"], None)
    lines.append(_line("aggregate", metrics, *aggregate))
    source, length = metrics["spearman_source_only"], metrics["spearman_length_only"]
    lines += ["", f"Spearman from the source alone {_number(source)}, from the length alone "]
    lines[-1] += f"{_number(length)}."
    if metrics.get("share_of_ceiling") is not None:
        lines.append(f"Share of the oracle's noise ceiling: {metrics['share_of_ceiling']:.3f}.")
    return lines


def _line(name: str, row: dict[str, Any], *values: float | None) -> str:
    cells = [
        f"{_number(row[key])} {_interval(row[f'{key}_ci95'])}".strip()
        for key in ("spearman", "spearman_within_source")
    ]
    return "| " + " | ".join([name, *cells, *map(_number, values)]) + " |"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _interval(value: tuple[float, float] | None) -> str:
    return "" if value is None else f"[{value[0]:.3f}, {value[1]:.3f}]"
