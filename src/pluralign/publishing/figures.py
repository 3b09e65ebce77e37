"""The paper's figures for one ensemble, drawn with matplotlib. They draw what was measured and compute nothing.

Decided here: what each figure shows, and its colours. On a page the colours become CSS variables, so that one drawing
serves light and dark; ``save_figures`` writes the same drawings as PNG and SVG files.
"""

import html
import io
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from pluralign.core.files import atomic_write
from pluralign.theory.best_of_n import BestOfN
from pluralign.votes.summary import Inspection

INK, MUTED, GRID = "#1d2433", "#687083", "#dfe3ea"
ENSEMBLE, RIVAL, FLOOR, BAND = "#2f6fde", "#c8621b", "#7a52c7", "#e9f0fc"
COLOURS = {"ink": INK, "muted": MUTED, "grid": GRID, "ensemble": ENSEMBLE, "rival": RIVAL, "floor": FLOOR, "band": BAND}
OPPOSITE, EVEN, ALIKE = "#c4601c", "#f6f4f0", "#2e6cd8"
"""Ends and middle of the heat map, the same on light and dark pages."""
STYLE: dict[Any, Any] = {
    "font.size": 10.0,
    "font.family": "DejaVu Sans",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "text.color": INK,
    "grid.color": GRID,
    "svg.fonttype": "none",
    "svg.hashsalt": "pluralign",
}
_CLASH_FREE = 0.024
"""Least distance of two labels beside a figure, as a share of its height."""


def figure(width: float = 7.0, height: float = 3.8) -> tuple[Figure, Axes]:
    """Return an empty figure in the house style."""
    with rc_context(STYLE):
        drawing = Figure(figsize=(width, height), layout="constrained")
        drawing.patch.set_alpha(0)
        axes = drawing.add_subplot()
        axes.patch.set_alpha(0)
    return drawing, axes


def share_histogram(facts: Inspection) -> Figure:
    """Pairs by the share of people on the majority's side: the paper's histogram of p."""
    with rc_context(STYLE):
        drawing, axes = figure(height=3.0)
        own_bars = all(bar.low == bar.high for bar in facts.histogram)
        middles = [(bar.low + bar.high) / 2 for bar in facts.histogram]
        width = 0.8 * min([b - a for a, b in itertools.pairwise(middles)], default=0.05)
        heights = [bar.count / facts.pairs for bar in facts.histogram]
        axes.bar(middles, heights, width=width, color=ENSEMBLE)
        for x, height in zip(middles, heights, strict=True):
            axes.annotate(f"{height:.0%}", (x, height), ha="center", va="bottom", xytext=(0, 2),
                          textcoords="offset points", color=MUTED, fontsize=9)  # fmt: skip
        if own_bars:
            axes.set_xticks(middles, [f"{x:.2f}" for x in middles])
        axes.set_xlabel("share of people on the majority's side")
        axes.set_ylabel("share of pairs")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_ylim(0, max(heights) * 1.15)
    return drawing


def brier_by_size(facts: Mapping[str, Any]) -> Figure:
    """Held-out Brier score against k with floor, constant ½, soft BT and noise: the paper's Figure 2."""
    with rc_context(STYLE):
        drawing, axes = figure()
        history = facts["history"]
        sizes, scores = [row["k"] for row in history], [row["test_brier"] for row in history]
        baselines = facts["baselines"]
        floor = baselines["floor"]["brier"]
        axes.axhspan(0, floor, color=BAND, zorder=0, linewidth=0)
        axes.plot(sizes, scores, marker="o", color=ENSEMBLE, linewidth=2, zorder=3)
        lines = [(scores[-1], f"{facts['method']} {scores[-1]:.4f}", ENSEMBLE)]
        named = (("floor", "floor", FLOOR), ("constant_half", "constant ½", MUTED), ("soft_bt", "one soft BT", RIVAL))
        for key, name, colour in named:
            if key in baselines:
                value = baselines[key]["brier"]
                axes.axhline(value, color=colour, linestyle="--", linewidth=1.2)
                lines.append((value, f"{name} {value:.4f}", colour))
        noise = facts["test"]["noise"]
        if noise is not None:
            axes.axhline(noise, color=MUTED, linestyle=":", linewidth=1.2)
            lines.append((noise, f"noise {noise:.4f}", MUTED))
        top = max([value for value, _, _ in lines] + scores) * 1.08
        axes.set_ylim(0, top)
        axes.set_xlim(min(sizes) - 0.3, max(sizes) + 0.3)
        axes.set_xticks(sizes)
        for height, (_, label, colour) in zip(_apart([v / top for v, _, _ in lines]), lines, strict=True):
            axes.annotate(label, (1.015, height), xycoords="axes fraction", va="center", color=colour, fontsize=9)
        axes.set_xlabel("members k")
        axes.set_ylabel("held-out Brier score")
    return drawing


def _apart(heights: Sequence[float]) -> list[float]:
    """Return heights moved up as little as needed for labels not to overlap."""
    moved: dict[int, float] = {}
    last = -1.0
    for position in sorted(range(len(heights)), key=heights.__getitem__):
        last = max(heights[position], last + 2 * _CLASH_FREE)
        moved[position] = last
    return [moved[position] for position in range(len(heights))]


def reliability_curve(facts: Mapping[str, Any]) -> Figure:
    """Observed against predicted shares, with two standard errors."""
    with rc_context(STYLE):
        drawing, axes = figure(4.6, 4.2)
        curve = facts["reliability"]
        axes.plot([0, 1], [0, 1], color=MUTED, linestyle="--", linewidth=1)
        spread = [0.0 if error is None else 2 * error for error in curve["standard_error"]]
        axes.errorbar(curve["predicted"], curve["observed"], yerr=spread, fmt="o-", color=ENSEMBLE, linewidth=1.5,
                      markersize=5, elinewidth=1)  # fmt: skip
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.set_aspect("equal")
        axes.grid(linewidth=0.6)
        axes.set_xlabel("predicted share preferring a")
        axes.set_ylabel("observed share")
    return drawing


def tau_heat_map(tau: Sequence[Sequence[float | None]]) -> Figure:
    """Kendall's τ between members, averaged over prompts: the paper's Figure 3."""
    with rc_context(STYLE):
        k = len(tau)
        side = min(6.4, 1.6 + 0.55 * k)
        drawing, axes = figure(side, side)
        values = [[float("nan") if value is None else value for value in row] for row in tau]
        colours = LinearSegmentedColormap.from_list("tau", [OPPOSITE, EVEN, ALIKE])
        axes.pcolormesh(values, cmap=colours, vmin=-1, vmax=1, edgecolors="none")
        for row in range(k):
            for column in range(k):
                value = values[row][column]
                label = "–" if value != value else f"{value:.2f}".replace("0.", ".").replace("-", "−")
                ink = "#ffffff" if abs(value) > 0.65 else "#1a1d24"
                axes.text(column + 0.5, row + 0.5, label, ha="center", va="center", fontsize=8.5, color=ink)
        axes.set_xticks([i + 0.5 for i in range(k)], [str(i) for i in range(k)])
        axes.set_yticks([i + 0.5 for i in range(k)], [str(i) for i in range(k)])
        axes.invert_yaxis()
        axes.set_aspect("equal")
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.set_xlabel("member")
        axes.set_ylabel("member")
    return drawing


def best_of_n_curves(found: BestOfN) -> Figure:
    """What each member's best-of-N policy earns, in its own eyes and the others', against its distance to the base."""
    with rc_context(STYLE):
        drawing, axes = figure()
        for j, (own, others) in enumerate(zip(found.own, found.others, strict=True)):
            axes.plot(found.kl, own, color=ENSEMBLE, linewidth=1.4, marker="o", markersize=3)
            axes.plot(found.kl, others, color=RIVAL, linewidth=1.0, linestyle="--")
            axes.annotate(str(j), (found.kl[-1], own[-1]), xytext=(5, 0), textcoords="offset points", va="center",
                          fontsize=8, color=ENSEMBLE)  # fmt: skip
        axes.axhline(0, color=MUTED, linewidth=0.8)
        axes.set_xticks(found.kl, [f"{kl:.2f}\nN={n}" for n, kl in zip(found.n, found.kl, strict=True)], fontsize=8)
        axes.set_xlabel("KL divergence from the base, in nats")
        axes.set_ylabel("mean reward, in standard deviations")
        axes.plot([], [], color=ENSEMBLE, label="in its own eyes")
        axes.plot([], [], color=RIVAL, linestyle="--", label="in the others' eyes")
        axes.legend(frameon=False, fontsize=9, loc="upper left")
    return drawing


def as_svg(drawing: Figure, title: str) -> str:
    """Return a drawing as SVG for an HTML page: colours as CSS variables, a label for screen readers."""
    buffer = io.StringIO()
    with rc_context(STYLE):
        drawing.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(
        r' id="(?:figure|axes|patch|text|line2d|matplotlib\.axis|xtick|ytick|QuadMesh|[A-Z]\w*)_\d+"', "", text
    )
    for name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    text = text.replace("'DejaVu Sans'", "inherit")
    label = html.escape(title, quote=True)
    size = re.search(r'width="([\d.]+)pt"', text)
    width = float(size.group(1)) if size else 500.0
    head = f'<svg role="img" aria-label="{label}" style="width:{width:.0f}pt;max-width:100%;height:auto"'
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
    return text.replace("<svg", head, 1)


def save_figures(drawings: Mapping[str, Figure], folder: str | os.PathLike[str]) -> list[Path]:
    """Write every drawing as NAME.png and NAME.svg, and return the paths."""
    paths = []
    for name, drawing in drawings.items():
        for kind in ("png", "svg"):
            path = Path(folder) / f"{name}.{kind}"
            with atomic_write(path) as partial, rc_context({**STYLE, "savefig.facecolor": "white"}):
                metadata = {"Date": None} if kind == "svg" else None
                drawing.savefig(partial, format=kind, dpi=160, metadata=metadata, transparent=False)
            paths.append(path)
    return paths
