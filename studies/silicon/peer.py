"""Times that AIConfigurator tells for the measured systems, on the rows that jaxmoe is judged on.

    pip install aiconfigurator==0.12.0
    python studies/silicon/peer.py --data ../shared/measured/silicon/silicon_sample.csv

Writes peer.csv, a line for each configuration: told milliseconds, or why the row is not covered. It asks for a row as
the row states it; where that fails, with precisions as the weights have them; then over as many GPUs as experts have.
`study.py tables` puts its errors beside ours. An hour on one core, row by row; what is there is not asked again.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rows import Measured, concurrency_of, deployment_of, read_rows

from jaxmoe.experiment.table import folder_of_tables, script_options
from jaxmoe.files import read_table, write_table

HERE = Path(__file__).resolve().parent
COLUMNS = ("id", "ttft_ms", "tpot_ms", "asked", "failed")


def asked(row: dict[str, str]) -> Iterator[tuple[str, dict[str, object]]]:
    """Settings of one row by name, in the order in which they are tried."""
    deployment = deployment_of(row)
    batch = int(row["batch_size"])
    common = {
        "model_path": row["model_path"],
        "system_name": row["system"],
        "backend_name": row["backend"],
        "isl": int(row["isl"]),
        "osl": int(row["osl"]),
    }
    parallel = {
        "batch_size": batch,
        "tp_size": int(row["tp_size"]),
        "attention_dp_size": int(row["attention_dp_size"] or 1),
        "moe_tp_size": int(row["moe_tp_size"]),
        "moe_ep_size": int(row["moe_ep_size"]),
    }
    precisions = {"gemm_quant_mode": row["gemm_quant_mode"], "moe_quant_mode": row["moe_quant_mode"]}
    yield "as stated", common | parallel | precisions
    yield "precisions of the weights", common | parallel
    concurrency = concurrency_of(row) or batch * deployment.data
    counted_once = {
        "batch_size": max(1, concurrency // deployment.data),
        "tp_size": deployment.tensor,
        "attention_dp_size": deployment.data,
        "moe_tp_size": deployment.expert_tensor,
        "moe_ep_size": deployment.expert_ranks,
    }
    yield "GPUs of the experts", common | counted_once | precisions
    yield "GPUs of the experts, precisions of the weights", common | counted_once


def told_by_peer(rows: Sequence[Measured]) -> np.ndarray:
    """Seconds to the first token and per token of every row, [row, 2], from peer.csv; nan where it has none."""
    lines = {line["id"]: line for line in read_table(HERE / "peer.csv")}
    names = ("ttft_ms", "tpot_ms")
    return (
        np.array([[float(lines.get(row.columns["id"], {}).get(name) or "nan") for name in names] for row in rows])
        * 1e-3
    )


def told(row: Measured) -> dict[str, object]:
    """A line of the table."""
    from aiconfigurator.cli.api import cli_estimate  # a peer, no dependency of ours

    failed = ""
    for name, settings in asked(row.columns):
        try:
            found = cli_estimate(mode="agg", **settings)
        except Exception as error:  # whatever it raises, the row is not covered
            said = " ".join(f"{type(error).__name__}: {error}".split())
            failed = failed or said.split(" at /")[0][:120]  # without the folder that the package lies in
            continue
        return {"id": row.columns["id"], "ttft_ms": f"{found.ttft:.5g}", "tpot_ms": f"{found.tpot:.5g}", "asked": name}
    return {"id": row.columns["id"], "failed": failed}


def main() -> None:
    parser = script_options(__doc__, writes=True)
    parser.add_argument("--data", type=Path, required=True, help="a file of the columns of silicon_sample.csv")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    path = folder_of_tables(HERE, options) / "peer.csv"
    lines: list[dict[str, object]] = [*read_table(path)] if path.exists() else []
    done = {line["id"] for line in lines}
    for row in read_rows(options.data):
        if row.columns["id"] not in done:
            lines.append(dict.fromkeys(COLUMNS) | told(row))
            write_table(path, lines)


if __name__ == "__main__":
    main()
