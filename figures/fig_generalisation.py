"""Figures of the study `generalisation`, drawn from its table alone.

python figures/fig_generalisation.py
"""

from pathlib import Path

import numpy as np
from tables import STUDIES, Rows, distinct, images_folder, read_table, select

from jaxmoe.report import style

TITLES = {
    "deepseek_cut": "DeepSeek-V2-Lite, 4x8 mesh, cut experts",
    "deepseek_whole": "DeepSeek-V2-Lite, 4x8 mesh, 3 experts fit a die",
    "deepseek_roomy": "DeepSeek-V2-Lite, 4x8 mesh, 8 experts fit a die",
    "gpt_oss_whole": "GPT-OSS-20B, 4x4 mesh, 3 experts fit a die",
    "mixtral_whole": "Mixtral-8x7B, 4x4 mesh, 1 expert fits a die",
}


def ratios(rows: Rows) -> tuple[list[str], list[str], np.ndarray]:
    """Rows and columns, and time over that of the plan tuned on the topic itself, mean over seeds and layers."""
    tuned, judged = distinct(rows, "tuned_on"), distinct(rows, "judged_on")

    def seconds(on: str, of: str) -> float:
        return float(np.mean([float(row["mean_s"]) for row in select(rows, tuned_on=on, judged_on=of)]))

    own = np.array([seconds(topic, topic) for topic in judged])
    return tuned, judged, np.array([[seconds(on, of) for of in judged] for on in tuned]) / own


def draw(rows: Rows, path: Path) -> None:
    """One matrix for each case."""
    cases = distinct(rows, "case")
    figure = style.new_figure(
        5.2 * len(cases), 6.4, "Time of a layer on held-out text, over that of a plan tuned on the topic"
    )
    for axes, case in zip(np.ravel(figure.subplots(1, len(cases))), cases, strict=True):
        tuned, judged, ratio = ratios(select(rows, case=case))
        axes.imshow(np.log(ratio), cmap="Reds", vmin=0, vmax=np.log(3), aspect="auto")
        for row, column in np.ndindex(ratio.shape):
            ink = "white" if ratio[row, column] > 2 else style.INK
            axes.text(column, row, f"{ratio[row, column]:.2f}", ha="center", va="center", color=ink, fontsize=8)
        axes.set_xticks(range(len(judged)), judged, rotation=40, ha="right", fontsize=8)
        axes.set_yticks(range(len(tuned)), tuned, fontsize=8)
        axes.set_xlabel("judged on", fontsize=9)
        axes.set_ylabel("tuned on", fontsize=9)
        axes.set_title(TITLES[case], fontsize=style.PANEL_SIZE)
    style.save(figure, path)


def main() -> None:
    """Draw it."""
    draw(read_table(STUDIES / "generalisation" / "times.csv"), images_folder(__doc__) / "generalisation.png")


if __name__ == "__main__":
    main()
