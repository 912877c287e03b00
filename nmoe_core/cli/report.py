"""`nmoe report`: the table of a run."""

from __future__ import annotations

import argparse
from typing import Any

from nmoe_core.cli.flags import add_run_flags, run_of
from nmoe_core.cli.output import print_json, print_table


def register(verbs: Any) -> None:
    """Add the verb."""
    report = verbs.add_parser("report", help="what came out of a run")
    add_run_flags(report, is_required=True)
    report.add_argument("--json", action="store_true")
    report.set_defaults(run=run_report)


def run_report(arguments: argparse.Namespace) -> int:
    """Print the table of a run whose pipeline has ended."""
    from nmoe_core.tasks.report import run_report as collect

    report = collect(run_of(arguments))
    if arguments.json:
        print_json(report)
    else:
        _print(report)
    return 0


def _print(report: dict[str, Any]) -> None:
    columns = list(report["sources"][0])
    rows = [[source[key] for key in columns] for source in report["sources"]]
    summed = columns[1:8]
    totals = [sum(source[key] for source in report["sources"]) for key in summed]
    print_table(columns, [*rows, ["total", *totals, None, None, None]])
    print("topics: distinct topics in a window of seq_len tokens, mean over windows\n")
    for kind, metrics in report["heads"].items():
        low, high = metrics["spearman_ci95"] or (float("nan"), float("nan"))
        test = metrics["test"]
        print(
            f"{kind}: Spearman {_two(metrics['spearman'])} with the oracle "
            f"on {metrics['n']} held-out documents (95 % {low:.2f} to {high:.2f}; "
            f"source alone {_two(metrics['spearman_source_only'])}, "
            f"length alone {_two(metrics['spearman_length_only'])}); "
            + (
                f"{_two(test['spearman'])} on {test['n']} untouched test documents"
                if test
                else "no figure of untouched documents: test has no labels"
            )
        )
    taus = ", ".join(f"{name} {value:.3f}" for name, value in report["thresholds"].items())
    print(f"thresholds: {taus}")
    print(f"oracle: {report['oracle']}; backbone: {report['backbone']}")
    if report["backbone"] == "tiny":
        print("(both stand in for large models: the figures show the machinery, not the text)")
    plan = report["plan"]
    print(
        f"\nloader: {plan['steps']} steps of {plan['batch_size']} x {plan['seq_len']} tokens; "
        f"first {plan['digest_steps']} batches {plan['digest'][:16]}"
    )
    print(f"plan:   {plan['path']}\nfiles:  {report['root']}")


def _two(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.2f}"
