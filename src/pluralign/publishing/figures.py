"""The paper's figures for one ensemble, drawn with matplotlib from measured results. Nothing is computed here.

This module decides the content and the colours of each figure. On an HTML page the colours become CSS variables, so
that one drawing serves light and dark pages. ``save_figures`` writes the same drawings as PNG and SVG files. pyplot is
not used, so no figure stays in memory. What votes cannot measure is not drawn: the floor at 2–3 votes per pair, and
error bars from fewer than 20 prompts.
"""

import html
import io
import itertools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from pluralign.core.errors import UsageError
from pluralign.core.files import atomic_write, refuse_foreign
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.record import Evaluation, FitRecord
from pluralign.ensemble.verdict import main_evaluation
from pluralign.measuring.camps import CHANCE, CampStudy
from pluralign.measuring.comparison import floor_is_compared
from pluralign.publishing.tables import number
from pluralign.theory.best_of_n import BestOfN
from pluralign.theory.intervals import ENOUGH_CLUSTERS
from pluralign.votes.summary import Bar, Inspection

INK, MUTED, GRID = "#1d2433", "#687083", "#dfe3ea"
ENSEMBLE, RIVAL, FLOOR, BAND = "#2f6fde", "#c8621b", "#7a52c7", "#e9f0fc"
COLOURS = {"ink": INK, "muted": MUTED, "grid": GRID, "ensemble": ENSEMBLE, "rival": RIVAL, "floor": FLOOR, "band": BAND}
HEAT = LinearSegmentedColormap.from_list("heat", ["#c4601c", "#f6f4f0", "#2e6cd8"])
"""Colours from the least to the most similar in heat maps, the same on light and dark pages."""
MARK = {"Creator": "pluralign"}
"""In the files that ``save_figures`` writes."""
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
_LABEL_HEIGHT = 0.048
"""Smallest distance of two labels beside a figure, as a share of its height."""


class Drawing(Figure):
    """A figure that a notebook shows without pyplot."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        with rc_context(STYLE):
            self.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()


def figure(width: float = 7.0, height: float = 3.8) -> tuple[Figure, Axes]:
    """Return an empty figure in the common style."""
    drawing, (axes,) = panels(width, height)
    return drawing, axes


def panels(width: float, height: float, widths: Sequence[float] = (1.0,), rows: int = 1) -> tuple[Figure, list[Axes]]:
    """Return an empty figure in the common style, with rows of axes of these relative widths."""
    drawing = Drawing(figsize=(width, height), layout="constrained")
    grid = drawing.add_gridspec(rows, len(widths), width_ratios=widths)
    axes = [drawing.add_subplot(grid[place]) for place in range(rows * len(widths))]
    for one in axes:
        one.patch.set_alpha(0)
    return drawing, axes


@rc_context(STYLE)
def _one(draw: Callable[..., None], *what: Any, size: tuple[float, float] = (7.0, 3.8)) -> Figure:
    """Return a figure with one drawing."""
    drawing, axes = figure(*size)
    draw(axes, *what)
    return drawing


@rc_context(STYLE)
def plot_ensemble(ensemble: RewardEnsemble) -> Figure:
    """Draw the held-out Brier score by number of members beside the reliability curve, from the record of the fit."""
    record, main = ensemble.record, main_evaluation(ensemble.record)
    if main is None:
        raise UsageError("the ensemble has no held-out figures to plot; use evaluate(ensemble, votes).plot().")
    if not record.history or record.evaluation is None:
        return reliability_curve(main)
    drawing, (left, right) = panels(11.5, 4.2, (1.3, 1.0))
    _draw_sizes(left, record, record.evaluation)
    _draw_reliability(right, main)
    return drawing


def share_histogram(votes: Inspection) -> Figure:
    """Draw the distribution of the majority share over pairs: the paper's histogram of p."""
    return _one(_draw_shares, votes.histogram, size=(7.0, 3.0))


@rc_context(STYLE)
def share_panels(histograms: Mapping[str, Sequence[Bar]]) -> Figure:
    """Draw the distribution of the majority share for several data sets, by their titles."""
    rows = math.ceil(len(histograms) / 2)
    drawing, axes = panels(11.0, 3.0 * rows, (1.0, 1.0), rows)
    for panel, (title, bars) in zip(axes, histograms.items(), strict=False):
        _draw_shares(panel, bars)
        panel.set_title(title)
    return drawing


def _draw_shares(axes: Axes, bars: Sequence[Bar]) -> None:
    middles, n_pairs = [(bar.low + bar.high) / 2 for bar in bars], sum(bar.count for bar in bars)
    width = 0.8 * min([b - a for a, b in itertools.pairwise(middles)], default=0.05)
    heights = [bar.count / n_pairs for bar in bars]
    axes.bar(middles, heights, width=width, color=ENSEMBLE)
    for x, height in zip(middles, heights, strict=True):
        axes.annotate(f"{height:.0%}", (x, height), ha="center", va="bottom", xytext=(0, 2),
                      textcoords="offset points", color=MUTED, fontsize=9)  # fmt: skip
    if all(bar.low == bar.high for bar in bars):
        axes.set_xticks(middles, [f"{x:.2f}" for x in middles])
    axes.set(xlabel="majority share", ylabel="share of pairs", ylim=(0, max(heights) * 1.15))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def brier_by_size(record: FitRecord, evaluation: Evaluation) -> Figure:
    """Draw the held-out Brier score by k, with floor, constant ½, soft BT and noise: the paper's Figure 2."""
    return _one(_draw_sizes, record, evaluation)


@rc_context(STYLE)
def brier_panels(records: Mapping[str, FitRecord]) -> Figure:
    """Draw the held-out Brier score by k for several data sets, always with the floor: the paper's Figure 2.

    Args:
        records: of fits with held-out figures, by the title of the data set.
    """
    drawing, axes = panels(11.0, 3.7 * math.ceil(len(records) / 2), (1.0, 1.0), math.ceil(len(records) / 2))
    for panel, (title, record) in zip(axes, records.items(), strict=False):
        if record.evaluation is None:
            raise UsageError(f"the ensemble of {title} has no held-out figures to plot.")
        _draw_sizes(panel, record, record.evaluation, floor=True)
        panel.set_title(title)
    return drawing


def _draw_sizes(axes: Axes, record: FitRecord, evaluation: Evaluation, floor: bool = False) -> None:
    """Draw Figure 2; the floor is drawn if the votes can measure it, or if ``floor`` is true."""
    sizes, scores = [row.k for row in record.history], [row.test_brier for row in record.history]
    named = {"constant_half": ("constant ½", MUTED), "soft_bt": ("soft BT", RIVAL)}
    if floor or floor_is_compared(evaluation):
        named["floor"] = ("floor", FLOOR)
        axes.axhspan(0, evaluation.baselines["floor"].brier, color=BAND, zorder=0, linewidth=0)
    axes.plot(sizes, scores, marker="o", color=ENSEMBLE, linewidth=2, zorder=3)
    own = record.kept.test_brier if record.kept else scores[-1]
    lines = [(own, f"{record.method} {own:.4f}", ENSEMBLE)]
    for key, (name, colour) in named.items():
        if key in evaluation.baselines:
            value = evaluation.baselines[key].brier
            axes.axhline(value, color=colour, linestyle="--", linewidth=1.2)
            lines.append((value, f"{name} {value:.4f}", colour))
    noise = evaluation.test.noise
    if not math.isnan(noise):
        axes.axhline(noise, color=MUTED, linestyle=":", linewidth=1.2)
        lines.append((noise, f"noise {noise:.4f}", MUTED))
    top = max([value for value, _, _ in lines] + scores) * 1.08
    axes.set(ylim=(0, top), xlim=(min(sizes) - 0.3, max(sizes) + 0.3), xticks=sizes)
    _label_beside(axes, lines)
    axes.set(xlabel="number of members (k)", ylabel="held-out Brier score")


def _label_beside(axes: Axes, lines: Sequence[tuple[float, str, str]], distance: float = _LABEL_HEIGHT) -> None:
    """Write labels to the right of the axes in their colours, at the height of their values or just above another."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)
    height = -1.0
    for value, label, colour in sorted(lines, key=lambda line: line[0]):
        height = max((value - low) / (high - low), height + distance)
        axes.annotate(label, (1.015, height), xycoords="axes fraction", va="center", color=colour, fontsize=9)


def reliability_curve(evaluation: Evaluation) -> Figure:
    """Draw observed against predicted shares, with bars of two standard errors if there are enough prompts."""
    return _one(_draw_reliability, evaluation, size=(4.6, 4.2))


def _draw_reliability(axes: Axes, evaluation: Evaluation) -> None:
    curve = evaluation.reliability
    axes.plot([0, 1], [0, 1], color=MUTED, linestyle="--", linewidth=1)
    spread = 2 * np.nan_to_num(np.asarray(curve.standard_error, dtype=np.float64))  # NaN: a bin with one pair
    bars = spread if evaluation.prompts >= ENOUGH_CLUSTERS else None
    axes.errorbar(curve.predicted, curve.observed, yerr=bars, fmt="o-", color=ENSEMBLE, linewidth=1.5, markersize=5,
                  elinewidth=1)  # fmt: skip
    axes.grid(linewidth=0.6)
    labels = {"xlabel": "predicted share preferring response a", "ylabel": "observed share"}
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", **labels)


def tau_heat_map(tau: Sequence[Sequence[float]]) -> Figure:
    """Draw Kendall's τ between members, averaged over prompts: the paper's Figure 3. NaN is shown as a dash."""
    side = min(6.4, 1.6 + 0.55 * len(tau))
    return _one(_draw_tau, tau, size=(side, side))


@rc_context(STYLE)
def tau_panels(taus: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """Draw Kendall's τ between members for several data sets, with its mean over pairs: the paper's Figure 3.

    Args:
        taus: τ between members, by the title of the data set.
    """
    side, rows = min(4.6, 1.6 + 0.45 * max(map(len, taus.values()))), math.ceil(len(taus) / 2)
    drawing, axes = panels(2 * max(side, 3.0), rows * max(side, 3.0), (1.0, 1.0), rows)
    for panel, (title, tau) in zip(axes, taus.items(), strict=False):
        _draw_tau(panel, tau)
        pairs = [tau[j][i] for j in range(len(tau)) for i in range(j)]
        mean = f": mean τ {number(float(np.mean(pairs)), 2)}" if pairs else ""
        panel.set_title(f"{title}{mean}", fontsize=11)
    return drawing


def _draw_tau(axes: Axes, tau: Sequence[Sequence[float]]) -> None:
    middles = [j + 0.5 for j in range(len(tau))]
    axes.pcolormesh(tau, cmap=HEAT, vmin=-1, vmax=1, edgecolors="none")
    _write_cells(axes, middles, tau, lambda value: abs(value) > 0.65)
    names = list(map(str, range(len(tau))))
    axes.set(xticks=middles, xticklabels=names, yticks=middles, yticklabels=names, aspect="equal", ylabel="member")


def _write_cells(
    axes: Axes, middles: Sequence[float], rows: Sequence[Sequence[float]], is_dark: Callable[[float], bool]
) -> None:
    """Write the value of every cell of a heat map, whose columns have these middles, in white on dark colours."""
    for row, values in enumerate(rows):
        for column, value in zip(middles, values, strict=True):
            label, ink = number(value, 2).replace("0.", "."), "#ffffff" if is_dark(value) else "#1a1d24"
            axes.text(column, row + 0.5, label, ha="center", va="center", fontsize=8.5, color=ink)
    axes.invert_yaxis()
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xlabel("member")


@rc_context(STYLE)
def camp_heat_map(study: CampStudy) -> Figure:
    """Draw the agreement of camps and members. A frame marks the member that stands for a camp."""
    rows, k = len(study.camps), len(study.weights)
    values = np.array([[*camp.agreement, camp.soft_bt] for camp in study.camps])
    drawing, axes = figure(min(9.0, 3.0 + 0.55 * (k + 1)), 1.2 + 0.5 * rows)
    for left, right, part in ((0, k, values[:, :k]), (k + 0.3, k + 1.3, values[:, k:])):
        edges = np.linspace(left, right, part.shape[1] + 1)
        axes.pcolormesh(edges, np.arange(rows + 1), part, cmap=HEAT, vmin=2 * CHANCE - 1, vmax=1)
    middles = [*(np.arange(k) + 0.5), k + 0.8]
    _write_cells(axes, middles, values.tolist(), lambda value: abs(value - CHANCE) > 0.33)
    for row, camp in enumerate(study.camps):
        if camp.member is not None:
            axes.add_patch(Rectangle((camp.member, row), 1, 1, fill=False, edgecolor="#1a1d24", linewidth=2))
    axes.set_xlim(0, k + 1.3)  # soft BT stands apart
    axes.set_xticks(middles, [*map(str, range(k)), "soft BT"])
    axes.set_yticks(np.arange(rows) + 0.5, [f"{camp.camp} ({camp.share:.0%})" for camp in study.camps])
    return drawing


@rc_context(STYLE)
def best_of_n_curves(curves: BestOfN) -> Figure:
    """Draw the reward of each member's best-of-N policy against its KL divergence from the base policy."""
    drawing, axes = figure()
    for own, others in zip(curves.own, curves.others, strict=True):
        axes.plot(curves.kl, own, color=ENSEMBLE, linewidth=1.4, marker="o", markersize=3)
        axes.plot(curves.kl, others, color=RIVAL, linewidth=1.0, linestyle="--")
    axes.axhline(0, color=MUTED, linewidth=0.8)
    _label_beside(axes, [(own[-1], str(j), ENSEMBLE) for j, own in enumerate(curves.own)], 0.036)
    axes.set_xticks(curves.kl, [f"{kl:.2f}\nN={n}" for n, kl in zip(curves.n, curves.kl, strict=True)], fontsize=8)
    axes.set(xlabel="KL divergence from the base policy (nats)", ylabel="mean reward (standard deviations)")
    axes.plot([], [], color=ENSEMBLE, label="own reward")
    axes.plot([], [], color=RIVAL, linestyle="--", label="other members' reward")
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    return drawing


def as_svg(drawing: Figure, title: str) -> str:
    """Return a drawing as SVG for an HTML page, with CSS variables as colours and a label for screen readers."""
    buffer = io.StringIO()
    with rc_context(STYLE):
        drawing.savefig(buffer, format="svg", facecolor="none", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' id="(?:figure|axes|patch|text|line2d|matplotlib\.axis|[xy]tick|[A-Z]\w*)_\d+"', "", text)
    for name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    text = text.replace("'DejaVu Sans'", "inherit")
    width = 72 * drawing.get_figwidth()
    label = html.escape(title, quote=True)
    head = f'<svg role="img" aria-label="{label}" style="width:{width:.0f}pt;max-width:100%;height:auto"'
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
    return text.replace("<svg", head, 1)


def save_figures(drawings: Mapping[str, Figure], folder: str | os.PathLike[str]) -> list[Path]:
    """Write each drawing as NAME.png and NAME.svg, and return the paths."""
    paths = {Path(folder) / f"{name}.{kind}": drawing for name, drawing in drawings.items() for kind in ("png", "svg")}
    for path in paths:
        refuse_foreign(path, *MARK.values())
    for path, drawing in paths.items():
        with atomic_write(path) as partial, rc_context(STYLE):
            metadata = {"Date": None, **MARK} if path.suffix == ".svg" else MARK
            drawing.savefig(partial, format=path.suffix[1:], dpi=160, metadata=metadata)
    return list(paths)
