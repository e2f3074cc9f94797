"""The plot of time per output token against distinct adapters, the byte model beside it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

NEAR_ZERO = 3  # adapters whose tick would run into that of 0: they stand in the point's label


def plot_decode_tax(section: Mapping[str, Any], title: str, path: Path) -> None:
    """Draw the `decode_tax` section of a result as SVG. The same figures give the same bytes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    mpl.rcParams |= {"svg.hashsalt": "loraplex", "font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
    distinct = sorted(section["tpot_ms"], key=int)
    x = [int(d) for d in distinct]
    measured = [section["tpot_ms"][d]["median"] for d in distinct]
    floor = [section["floor_ms"][d] for d in distinct]
    over_base = [measured[0] * section["floor_over_base"][d] for d in distinct]
    errors = [
        [m - min(section["tpot_ms"][d]["values"]) for d, m in zip(distinct, measured, strict=True)],
        [max(section["tpot_ms"][d]["values"]) - m for d, m in zip(distinct, measured, strict=True)],
    ]
    figure, axes = pyplot.subplots(figsize=(7.5, 4.2), layout="constrained")
    axes.errorbar(x, measured, errors, marker="o", color="#1f5fa8", label="measured, median and range", capsize=3)
    axes.plot(x, over_base, "--", color="#1f5fa8", alpha=0.6, label="no adapter as measured, times the byte model")
    axes.plot(x, floor, "-", color="#888888", marker=".", label=f"byte model at {section['read_tb_s']} TB/s")
    for d, value in zip(x[1:], measured[1:], strict=True):
        label = f"{value / measured[0]:.2f}x" if d > NEAR_ZERO else f"{d}: {value / measured[0]:.2f}x"
        axes.annotate(label, (d, value), (0, 9), textcoords="offset points", ha="center", fontsize=9)
    axes.set_xlabel("distinct adapters in the batch")
    axes.set_ylabel("ms per output token")
    axes.set_xticks([0, *(d for d in x if d > NEAR_ZERO)])
    axes.set_ylim(0, 1.15 * max(measured + over_base))
    axes.grid(axis="y", alpha=0.3)
    axes.set_title(title, fontsize=10, loc="left")
    axes.legend(frameon=False, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
