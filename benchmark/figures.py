"""Figures of the report: curves, intervals, performance profiles, probabilities of improvement."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from benchmark import fail
from benchmark.runs import (
    RETURN,
    TRAINING_RETURN,
    Groups,
    Pair,
    Run,
    Scales,
    describe_key,
    drawn_keys,
    final_scores,
    normalised,
    returns_by_experiment,
    shared_keys,
)
from benchmark.statistics import (
    bootstrap_interval,
    interquartile_mean,
    performance_profile,
    student_half,
    student_interval,
)
from utils.errors import missing_package

try:
    from matplotlib.axes import Axes
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.mathtext import MathTextParser
    from matplotlib.ticker import EngFormatter, MaxNLocator
except ModuleNotFoundError as error:
    raise missing_package("benchmark.report", error) from error

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")  # Okabe and Ito, without yellow
LINES = ("-", "--", ":", "-.")  # with the colours: 28 curves that a colour-blind reader can tell apart
MARKERS = ("o", "s", "^", "D")  # the same for dots
BAND = "mean over seeds; band: 95% Student's t interval"
Estimate = tuple[str, Any, float, tuple[Any, Any] | None]  # name, colour, estimate, ends of its interval


@dataclass
class Look:
    """How experiments look in all figures."""

    labels: dict[str, str]
    styles: dict[str, dict[str, Any]]
    markers: dict[str, str]
    smooth: int = 1


def make_look(groups: Groups, labels: Sequence[str] = (), smooth: int = 1) -> Look:
    """Labels by experiment, those that are given first, and a colour, line and marker for each. Exits if a label is
    none.
    """
    given = dict(
        label.split("=", 1) if "=" in label else fail(f"--labels takes NAME=LABEL, not {label}") for label in labels
    )
    names = {exp_name for _, exp_name in groups}
    if not set(given) <= names:
        unknown = ", ".join(sorted(set(given) - names))
        fail(f"--labels takes experiments of these runs ({', '.join(sorted(names))}), not {unknown}")
    order = [*given, *sorted(names - set(given))]
    shown = [given.get(name, name) for name in order]
    for label in shown:
        if not label or label.startswith("_") or not is_drawable(label):
            fail(f"--labels takes labels that Matplotlib can draw and that do not begin with _, not {label!r}")
    if doubled := [label for label in shown if shown.count(label) > 1]:
        fail(f"--labels takes a label of its own for each experiment, and {doubled[0]} is there twice")
    styles = {
        name: {"color": COLORS[i % len(COLORS)], "linestyle": LINES[i // len(COLORS) % len(LINES)]}
        for i, name in enumerate(order)
    }
    markers = {name: MARKERS[i // len(COLORS) % len(MARKERS)] for i, name in enumerate(order)}
    return Look({name: given.get(name, name) for name in order}, styles, markers, smooth)


def is_drawable(label: str) -> bool:
    """Whether what is between dollar signs in a label is mathematics."""
    try:
        MathTextParser("path").parse(label)
    except ValueError:
        return False
    return True


def common_points(
    group: list[Run], key: str, size: int = 200, width: int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps (t,) that all runs' curves cover, at most `size`. Also the runs' median seconds (t,) and values (t, n) at
    these steps; values are moving averages over `width` points.

    Empty if there are none: the runs' evaluations do not overlap.
    """
    curves = [run.curves[key] for run in group]
    steps = np.unique(np.concatenate([curve[:, 0] for curve in curves]))
    steps = steps[(steps >= max(curve[0, 0] for curve in curves)) & (steps <= min(curve[-1, 0] for curve in curves))]
    if len(steps) > size:
        steps = steps[np.linspace(0, len(steps) - 1, size).round().astype(int)]
    seconds = np.stack([np.interp(steps, c[:, 0], c[:, 1]) for c in curves], axis=-1)
    values = np.stack([np.interp(steps, c[:, 0], smoothed(c[:, 2], width)) for c in curves], axis=-1)
    has_clock = ~np.isnan(seconds).any(axis=0)  # runs that failed have none at their end; the others' counts
    return steps, np.median(seconds[:, has_clock] if has_clock.any() else seconds, axis=-1), values


def smoothed(values: np.ndarray, width: int) -> np.ndarray:
    """Centred moving average over the first axis; fewer values count at the ends."""
    return np.stack([values[max(0, i - width // 2) : i + (width + 1) // 2].mean(0) for i in range(len(values))])


def draw_curve(axes: Axes, group: list[Run], key: str, look: Look, over_time: bool) -> None:
    """The mean over runs, with its interval as a band. If a run has fewer than three points, every point is a dot.

    Training returns are a thin line. Runs whose evaluations do not overlap are a thin line each.
    """
    style, label = look.styles[group[0].exp_name], look.labels[group[0].exp_name]
    is_training = key == TRAINING_RETURN
    steps, seconds, values = common_points(group, key, width=look.smooth)
    if min(len(run.curves[key]) for run in group) < 3 and not is_training:
        points = np.concatenate([run.curves[key] for run in group])
        x = points[:, 1] / 60 if over_time else points[:, 0]
        marker = look.markers[group[0].exp_name]
        axes.plot(x, points[:, 2], marker, color=style["color"], markersize=4, label=f"{label}, single runs")
    elif not len(steps):
        for run in group:
            x = run.curves[key][:, 1] / 60 if over_time else run.curves[key][:, 0]
            axes.plot(x, run.curves[key][:, 2], **style, linewidth=0.6, label=label)
    else:
        x = seconds / 60 if over_time else steps
        label = f"{label}, training" if is_training else label
        axes.plot(x, values.mean(-1), **style, linewidth=0.6 if is_training else 1.5, label=label)
        if len(group) > 1:
            axes.fill_between(x, *student_interval(values), color=style["color"], alpha=0.15, linewidth=0)


def in_reach(rows: Sequence[dict[str, str]], last: float) -> list[list[dict[str, str]]]:
    """Published curves, each sorted and up to its first step that is not below the last one of our runs."""
    curves: dict[tuple[str | None, ...], list[dict[str, str]]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: int(row["env_steps"])):  # two papers, or two protocols, are two curves
        curve = curves[tuple(row.get(column) for column in ("algorithm", "source", "env_version", "protocol"))]
        if not curve or int(curve[-1]["env_steps"]) < last:
            curve.append(row)
    return list(curves.values())


def limit(axes: Axes, values: Sequence[np.ndarray], has_origin: bool) -> None:
    """Axes from the runs' least to their greatest value: a wide band does not press the curves together."""
    all_values = np.concatenate([*values, [0.0] * has_origin])
    axes.set_xlim(left=0)
    if len(finite := all_values[np.isfinite(all_values)]):
        low, high = finite.min(), finite.max()
        room = 0.05 * (high - low) or 1.0
        axes.set_ylim(low - room, high + room)


def is_cut(axes: Axes) -> bool:
    """Whether a band goes beyond the panel."""
    low, high = axes.get_ylim()
    paths = [path for band in axes.collections if isinstance(band, PolyCollection) for path in band.get_paths()]
    return any(np.nanmin(y) < low or np.nanmax(y) > high for y in (np.asarray(path.vertices)[:, 1] for path in paths))


def together(scales: Scales) -> str:
    """The title of a panel of pooled tasks."""
    return f"{len(scales)} tasks together" if len(scales) > 1 else f"{next(iter(scales))}, normalised"


def draw_pooled(axes: Axes, groups: Groups, scales: Scales, look: Look, over_time: bool) -> None:
    """Normalised IQM over tasks, by share of a run's steps or by minutes; begins where all tasks have been evaluated.

    By minutes, a task whose runs have ended keeps its last value until the longest task has ended.
    """
    for exp_name in returns_by_experiment(groups):
        curves = [common_points(groups[env_id, exp_name], RETURN, width=look.smooth) for env_id in scales]
        if not all(len(steps) for steps, _, _ in curves):
            continue  # evaluations that do not overlap; the table has the final ones
        places = [seconds / 60 if over_time else steps / steps[-1] for steps, seconds, _ in curves]
        x = np.linspace(max(place[0] for place in places), max(place[-1] for place in places), 50)
        strata = []
        for place, (_, _, values), (low, high) in zip(places, curves, scales.values(), strict=True):
            at_x = np.stack([np.interp(x, place, run_values) for run_values in values.T], axis=-1)
            strata.append((at_x - low) / (high - low))
        style = look.styles[exp_name]
        axes.plot(x, interquartile_mean(np.concatenate(strata, axis=-1)), **style, label=look.labels[exp_name])
        if min(values.shape[-1] for values in strata) > 1:
            band = bootstrap_interval(interquartile_mean, strata, resamples=1000)
            axes.fill_between(x, *band, color=style["color"], alpha=0.15, linewidth=0)
    axes.set(title=together(scales), ylabel="normalised IQM, band: 95% bootstrap")
    axes.set_xlabel("minutes of training" if over_time else "share of the steps")
    axes.update_datalim([(0.0, 0.0)])
    axes.autoscale_view()
    axes.set_xlim(left=0)


def published_error(row: dict[str, str]) -> float:
    """Half of the interval of a published mean, if its standard deviation and the number of seeds are known, or 0."""
    has_interval = row["std"] and int(row["seeds"]) > 1
    return float(student_half(float(row["std"]), int(row["seeds"]))) if has_interval else 0.0


def draw_published(axes: Axes, curves: list[list[dict[str, str]]]) -> None:
    """Published curves of one task: means, with the interval if standard deviation and seeds are given."""
    for i, curve in enumerate(curves):
        first = curve[0]
        x, y = ([float(row[column]) for row in curve] for column in ("env_steps", "mean"))
        errors = [published_error(row) for row in curve]
        label = f"published: {first['algorithm']} ({first['source']}, {first['env_version']}, {first['seeds']} seeds)"
        gray = f"{0.25 + 0.5 * i / max(1, len(curves) - 1):.2f}"
        style: dict[str, Any] = {"color": gray, "marker": "sovD^X"[i % 6], "markersize": 4, "linewidth": 0.8}
        axes.errorbar(x, y, errors if all(errors) else None, **style, capsize=2, zorder=1, label=label)


def grid_of(count: int, width: float = 5.0, height: float = 3.4) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels, three in a row."""
    rows, columns = -(-count // 3), min(3, count)
    figure = Figure(figsize=(width * columns, height * rows + 0.8), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels[count:]:
        axes.set_axis_off()
    return figure, panels[:count]


def add_legend(figure: Figure, look: Look, title: str) -> None:
    """One legend below all panels, in the order of the labels."""
    handles = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    order = list(look.labels.values())
    labels = sorted(handles, key=lambda label: (order.index(label) if label in order else len(order), label))
    inches = 0.6 + 0.08 * max(map(len, labels))  # of one label with its line
    columns = max(1, min(len(labels), int(figure.get_figwidth() / inches)))
    figure.legend([handles[label] for label in labels], labels, loc="outside lower center", ncols=columns, title=title)


def draw(
    groups: Groups,
    scales: Scales,
    over_time: bool,
    look: Look | None = None,
    published: Sequence[dict[str, str]] = (),
) -> Figure:
    """A panel for each return, score and rating of each task; and one for all tasks together, if there are scales for
    it.
    """
    look = look or make_look(groups)
    panels: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for env_id, exp_name in sorted(groups, key=lambda name: (name[0], list(look.labels).index(name[1]))):
        for key in drawn_keys(groups[env_id, exp_name]):
            panels[env_id, RETURN if key == TRAINING_RETURN else key].append((exp_name, key))
    pooled = [group for (env_id, _), group in groups.items() if env_id in scales]
    has_pooled = bool(pooled) and min(len(run.curves[RETURN]) for group in pooled for run in group) >= 3
    figure, grid = grid_of(len(panels) + has_pooled)
    for axes, ((env_id, panel_key), curves) in zip(grid, panels.items(), strict=False):
        task = env_id.rpartition("-v")[0]
        behind = [row for row in published if row["env"] == task] if panel_key == RETURN and not over_time else []
        ends = [run.curves[key][-1, 0] for exp_name, key in curves for run in groups[env_id, exp_name]]
        published_curves = in_reach(behind, max(ends))
        draw_published(axes, published_curves)
        for exp_name, key in curves:
            draw_curve(axes, groups[env_id, exp_name], key, look, over_time)
        values = [run.curves[key][:, 2] for exp_name, key in curves for run in groups[env_id, exp_name]]
        for row in chain(*published_curves):
            values.append(float(row["mean"]) + published_error(row) * np.array([-1.0, 1.0]))
        limit(axes, values, panel_key == RETURN)
        task = env_id.rpartition(":")[2]  # without the module that it is imported from
        axes.set_title(task if panel_key == RETURN else f"{task}: {describe_key(panel_key)}")
        axes.set_xlabel("minutes of training" if over_time else "environment steps")
        if not over_time:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 200k
        if panel_key == RETURN:
            axes.set_ylabel("return")
        elif panel_key.startswith("selfplay/"):
            axes.set_ylabel("rating among own snapshots")
        else:
            axes.set(ylabel="score", ylim=(-0.03, 1.03))
        if is_cut(axes):
            axes.set_title(f"{axes.get_title()}\n(band cut at the edge)")
    if has_pooled:
        draw_pooled(grid[-1], groups, scales, look, over_time)
    for axes in grid:
        axes.grid(alpha=0.3)
    smooth = f"; moving average over {look.smooth} evaluations" if look.smooth > 1 else ""
    add_legend(figure, look, BAND + smooth)
    return figure


def draw_estimates(axes: Axes, rows: Sequence[Estimate]) -> None:
    """From top to bottom a name, its estimate as a dot and the interval as a bar, each in its colour."""
    for y, (_, color, x, ends) in enumerate(rows):
        if ends is not None:
            axes.plot(ends, [y, y], color=color, linewidth=6, alpha=0.4, solid_capstyle="butt")
        axes.plot([x], [y], "o", color=color, markersize=5)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(alpha=0.3, axis="x")


def draw_intervals(groups: Groups, scales: Scales, look: Look) -> Figure:
    """Final scores of each task with their intervals, and the normalised IQM of all tasks if there are scales."""
    panels = list(
        dict.fromkeys((env_id, key) for (env_id, _), group in groups.items() for key in shared_keys(group, "eval/"))
    )
    width = 4.0 + 0.08 * max(map(len, look.labels.values()))
    figure, grid = grid_of(len(panels) + bool(scales), width, height=0.8 + 0.35 * len(look.labels))
    for axes, (env_id, key) in zip(grid, panels, strict=False):
        rows = []
        for name, label in look.labels.items():
            if key in shared_keys(groups.get((env_id, name), []), "eval/"):
                scores = final_scores(groups[env_id, name], key)
                ends = student_interval(scores) if len(scores) > 1 else None
                rows.append((label, look.styles[name]["color"], float(scores.mean()), ends))
        draw_estimates(axes, rows)
        axes.set(
            title=env_id if key == RETURN else f"{env_id}: {describe_key(key)}", xlabel="mean, 95% Student's t interval"
        )
        axes.xaxis.set_major_locator(MaxNLocator(5))
    if scales:
        strata = normalised(groups, scales)
        rows = []
        for name in (name for name in look.labels if name in strata):
            ends = bootstrap_interval(interquartile_mean, strata[name]) if min(map(len, strata[name])) > 1 else None
            iqm = float(interquartile_mean(np.concatenate(strata[name])))
            rows.append((look.labels[name], look.styles[name]["color"], iqm, ends))
        draw_estimates(grid[-1], rows)
        grid[-1].set(title=together(scales), xlabel="normalised IQM, 95% stratified bootstrap")
    return figure


def draw_profiles(groups: Groups, scales: Scales, look: Look) -> Figure:
    """Performance profiles: the share of all runs whose normalised score exceeds a threshold (Agarwal et al., section
    4.2).
    """
    figure, (axes,) = grid_of(1, width=7.0)
    all_strata = normalised(groups, scales)
    top = max(float(np.max(values)) for strata in all_strata.values() for values in strata)
    thresholds = np.linspace(0.0, max(1.0, top), 200)

    def profile(scores: np.ndarray) -> np.ndarray:
        return performance_profile(scores, thresholds).T  # (t, resamples): intervals are over the last axis

    for name in (name for name in look.labels if name in all_strata):
        strata = all_strata[name]
        axes.plot(thresholds, profile(np.concatenate(strata)), **look.styles[name], label=look.labels[name])
        if min(map(len, strata)) > 1:
            band = bootstrap_interval(profile, strata, resamples=2000)
            axes.fill_between(thresholds, *band, color=look.styles[name]["color"], alpha=0.15, linewidth=0)
    axes.set(title=together(scales), xlabel="normalised score", ylabel="share of the runs above it")
    axes.set(xlim=(0, thresholds[-1]), ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    add_legend(figure, look, "band: 95% stratified bootstrap")
    return figure


def draw_improvement(pairs: Sequence[Pair], look: Look) -> Figure:
    """Probabilities of improvement, both directions of each pair below each other."""
    rows = []
    for ours, theirs, _, chances in pairs:
        for (a, b), chance in zip(((ours, theirs), (theirs, ours)), chances, strict=True):
            rows.append((f"{look.labels[a]} beats {look.labels[b]}", look.styles[a]["color"], *chance))
    figure = Figure(figsize=(8.0, 1.4 + 0.3 * len(rows)), layout="constrained")
    axes = figure.subplots()
    draw_estimates(axes, rows)
    axes.axvline(0.5, color="0.5", linewidth=0.8)
    axes.set(xlim=(-0.02, 1.02), xlabel="probability of improvement, 95% interval")
    return figure
