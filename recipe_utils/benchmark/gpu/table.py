"""The figures in markdown: shares of the matrix peak that was measured, and what failed."""

from collections.abc import Mapping
from typing import Any


def markdown(results: Mapping[str, Any]) -> str:
    """What is printed last.

    Args:
        results: as in ``results.json``.
    """
    stages: Mapping[str, Any] = results["stages"]
    peak = (stages.get("0 machine") or {}).get("matrix_peak_tflops")
    lines = [
        f"{results['device']}, torch {results['torch']}; "
        + (f"best bf16 product {peak:.3g} TFLOP/s" if peak else "no peak measured"),
        "",
        "| way | rows of | tokens/s | TFLOP/s | share of the measured peak | peak memory [GB] | update step [ms] |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for stage in stages.values():
        for row in [*stage.get("rows", ()), *stage.get("chunks", ())]:
            lines.append(_row(row, peak))
    for name, kernels in ((stages.get("8 speed") or {}).get("kernels") or {}).items():
        lines += ["", f"| kernels, {name} | ms | share |", "| --- | --- | --- |"]
        whole = sum(kernels.values()) or 1.0
        lines += [f"| {group} | {ms:.2f} | {ms / whole:.1%} |" for group, ms in kernels.items()]
    lines += [
        "",
        "| stage | seconds | checks passed | left out or not available |",
        "| --- " * 4 + "|",
    ]
    for name, stage in stages.items():
        checks = stage.get("checks", [])
        missing = [*stage.get("left_out", ()), *stage.get("not_available", ())]
        if "skipped" in stage:
            missing.append(stage["skipped"])
        passed = f"{sum(each['passed'] for each in checks)} of {len(checks)}"
        lines.append(
            f"| {name} | {stage.get('seconds', 0.0):.1f} | {passed} | {'; '.join(missing)} |"
        )
    return "\n".join([*lines, "", *failures(results)])


def _row(row: Mapping[str, Any], peak: float | None) -> str:
    if "error" in row:
        return f"| {row['way']} | {row['slots']} | {row['error']} | | | | |"
    share = f"{row['tflops'] / peak:.1%}" if peak else ""
    memory = "" if row["peak_gb"] is None else f"{row['peak_gb']:.1f}"
    return (
        f"| {row['way']} | {row['slots']} | {row['tokens_per_second']:.0f} | {row['tflops']:.3g} "
        f"| {share} | {memory} | {row['milliseconds']:.1f} |"
    )


def failures(results: Mapping[str, Any]) -> list[str]:
    """A line for each check that failed and each stage that raised."""
    found = []
    for name, stage in results["stages"].items():
        if "raised" in stage:
            found.append(f"FAILED {name}: {stage['raised'].strip().splitlines()[-1]}")
        for each in stage.get("checks", ()):
            if not each["passed"]:
                text = str(each["found"]).strip().splitlines()[-1]
                found.append(f"FAILED {name}: {each['name']}: {text}, bound {each['bound']}")
    return found
