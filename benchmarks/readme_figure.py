"""README's figure, from committed results: time and memory of one loss and gradient, against programs written by hand.

python benchmarks/readme_figure.py
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

HERE = Path(__file__).parent
PROGRAMS = {"hand": "by hand", "hand-chunked": "by hand, in chunks", "rlfx": "rlfx"}
COLOURS = ("0.75", "0.55", "tab:blue")


def main():
    record = json.loads((HERE / "results" / "ppo_grid.json").read_text())
    points = {tuple(row[k] for k in ("T", "B", "layers", "units")): row for row in record["results"]}
    rows = [points[point] for point in sorted(points)]
    labels = [f"{T}\n{B}\n{layers}x{units}" for T, B, layers, units in sorted(points)]
    figure, panels = plt.subplots(1, 2, figsize=(9.5, 2.6), layout="constrained")
    for axes, field, title in zip(panels, ("cpu_ms", "temp_mb"), ("CPU time", "temporary memory"), strict=True):
        for i, (name, label) in enumerate(PROGRAMS.items()):
            ratio = [r["programs"][name][field] / r["programs"]["hand"][field] for r in rows]
            axes.bar(np.arange(len(rows)) + 0.27 * (i - 1), ratio, 0.25, color=COLOURS[i], label=label)
        axes.set_title(f"{title}, by hand = 1", fontsize=9)
        axes.set_xlabel("timesteps / environments / hidden layers", fontsize=8)
        axes.set_xticks(range(len(rows)), labels, fontsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False
    )
    machine = f"{record['device']}, jax {record['versions']['jax']}, {record['date']}"
    figure.suptitle(f"PPO's loss and gradient over a rollout ({machine})", fontsize=9)
    figure.savefig(HERE.parent / "docs" / "readme.png", dpi=110)


if __name__ == "__main__":
    main()
