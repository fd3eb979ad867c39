"""Times of the rows of a table of DeepEP by a machine's fitted exchanges, each with its interval."""

from collections.abc import Mapping

import numpy as np

from jaxmoe.experiment.inputs import OptionError
from jaxmoe.experiment.measured_kernels.exchange_fit import MICRO, seconds_of
from jaxmoe.experiment.measured_kernels.exchange_tables import PARTS, SIDES, ExchangeTable, exchanges_of, load_of
from jaxmoe.hardware.gpu.deepep import Load
from jaxmoe.hardware.gpu.deepep_files import ExchangeFile, KnownExchange

BOUNDS = ("low_", "high_")


def predict_exchanges(table: ExchangeTable, file: ExchangeFile) -> tuple[dict[str, np.ndarray], list[str]]:
    """Predicted columns of a table with their bounds, us, and notes on rows that another version stands in for.

    Raises `OptionError` where the file has nothing measured of the table's kernels, on one node or on several.
    """
    columns = (table.column(side, part) for side in SIDES for part in PARTS[table.mode])
    found = {f"predicted_{bound}{name}": np.zeros(len(table.version)) for name in columns for bound in ("", *BOUNDS)}
    notes: dict[str, None] = {}
    for _, wanted, rows in exchanges_of([table]):
        known = [each for each in file.exchanges if _serves(each, wanted)]
        if not known:
            reach = "several nodes" if wanted["across"] == "nodes" else "one node"
            raise OptionError(
                f"{table.path}: {file.system} has no {wanted['side']} of DeepEP's {table.mode} kernels on {reach}; "
                "remove these rows, or calibrate with a table of them"
            )
        best = max(known, key=lambda each: (each.names["version"] == wanted["version"], each.told["rows"]))
        if best.names["version"] != wanted["version"]:
            notes[f"version {wanted['version']}: not measured; {best.names['version']} stands in"] = None
        load = Load(*(part[rows] for part in load_of(table, wanted["side"], file.processors, file.node)))
        seconds = seconds_of(best.kernel, load, file.links) / MICRO
        name = table.column(wanted["side"], wanted["part"])
        found[f"predicted_{name}"][rows] = seconds
        for bound, factor in zip(BOUNDS, best.interval, strict=True):
            found[f"predicted_{bound}{name}"][rows] = seconds * factor
    return found, list(notes)


def _serves(known: KnownExchange, wanted: Mapping[str, str]) -> bool:
    """Whether an exchange tells these rows. A low-latency kernel of several nodes is that of one, too."""
    reach = (wanted["across"], "nodes") if wanted["part"] == "avg_t" else (wanted["across"],)
    same = all(known.names[key] == wanted[key] for key in ("side", "part"))
    return same and known.names["across"] in reach
