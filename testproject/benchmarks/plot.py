"""The figures as a picture for the docs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from testproject.benchmarks import contenders
from testproject.benchmarks.scenarios import BASELINE, SCENARIOS

OURS, THEIRS = "#1f6f8b", "#b8b8b8"


def plot(results: Mapping[str, Any], file: Path) -> None:
    """Draw one panel for each scenario of the run: the rate as a share of the unprotected view's in the same round."""
    raced = {name: figures for name, figures in results.get("scenarios", {}).items() if name in SCENARIOS}
    # Text stays text, and the same figures give the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "benchmark", "font.size": 9}):
        figure = Figure(figsize=(9, 0.6 + 2.1 * len(raced)), layout="constrained")
        for axes, (name, figures) in zip(figure.subplots(len(raced), squeeze=False)[:, 0], raced.items(), strict=True):
            _panel(axes, f"({name}) {SCENARIOS[name].title}", figures)
        told = results["machine"]
        figure.supxlabel(
            f"requests/s ÷ those of the unprotected view's first requests; median and range of the rounds\n"
            f"{told['processor']}, PostgreSQL {told['postgresql']}, Python {told['python']}, Django {told['django']}",
            fontsize=8,
        )
        figure.savefig(file, format="svg", metadata={"Date": None})


def _panel(axes: Axes, title: str, figures: Mapping[str, Any]) -> None:
    rows = [(name, row) for name, row in figures.items() if name != BASELINE and "ratio" in row][::-1]
    ratios = [row["ratio"] for _, row in rows]
    below = [row["ratio"] - row["ratio_low"] for _, row in rows]
    above = [row["ratio_high"] - row["ratio"] for _, row in rows]
    axes.barh(
        [contenders.load(name).title for name, _ in rows],
        ratios,
        xerr=[below, above],
        color=[OURS if not contenders.load(name).requirements else THEIRS for name, _ in rows],
        error_kw={"elinewidth": 0.8, "ecolor": "#555555"},
    )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_title(title, loc="left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
