"""Figure of the best deployment in the study `serving`: what each method misses, over the requests it simulated.

python figures/fig_serving_best.py
"""

from tables import STUDIES, Rows, column, images_folder, read_table, select

from jaxmoe.report import style

METHODS = {
    "race": ("#0072B2", "o", "race, jaxmoe serve best"),
    "halving": ("#009E73", "s", "halving over growing stretches"),
    "guide": ("#D55E00", "^", "guided model, TPE"),
    "descent": ("#CC79A7", "D", "descent through the scan"),
    "estimate": ("#000000", "x", "closed form alone"),
}
WITHIN, SHARE = 2.0, 10.0  # % asked


def draw(rows: Rows) -> None:
    """A point for each setting and seed."""
    figure = style.new_figure(7.5, 4.2, "The best deployment: what methods miss and simulate")
    axes = figure.subplots()
    for method, (colour, marker, label) in METHODS.items():
        own = select(rows, method=method)
        share, regret = (100 * column(own, name) for name in ("share", "regret"))
        axes.plot(share, regret, marker, color=colour, markersize=5, linestyle="", label=label, alpha=0.8)
    axes.axhline(WITHIN, color=style.GUIDE, linewidth=1.0)
    axes.axvline(SHARE, color=style.GUIDE, linewidth=1.0)
    axes.set_yscale("symlog", linthresh=1.0)
    axes.set_ylim(-0.2, 100)
    axes.set_yticks([0, 1, 10, 100], ["0", "1", "10", "100"])
    axes.set_xlabel("requests simulated, % of a grid's")
    axes.set_ylabel("below the best that is known, %")
    style.legend_below(figure, [axes])
    style.save(figure, images_folder(__doc__) / "serving_best.png")


if __name__ == "__main__":
    tables = [read_table(STUDIES / "serving" / f"{name}.csv") for name in ("best", "descent")]
    draw([*tables[0], *({**row, "method": "descent"} for row in tables[1])])
