"""How far are fitted exchanges of DeepEP off, on what they were not fitted to? See README.md.

    python studies/measured/exchanges.py --data ../shared/measured/gpu

Fits the exchanges of each system, in minutes. Writes exchanges.csv (errors, held out by processors or sizes),
deepep_v1.csv (DeepEP's own table of H800, told by the fits of H100 and nothing but the H800's links), bandwidth.csv
(where the bytes of a normal exchange go on 1 to 8 nodes), exchanges of machines, and all_to_all.csv: TensorRT-LLM's
all-to-alls between GPUs of GB200, each number of ranks held out.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxmoe.experiment.measured_kernels.calibration import calibrate_tables
from jaxmoe.experiment.measured_kernels.exchange_fit import (
    MICRO,
    ExchangeFit,
    exchange_file,
    exchange_scores,
    fit_exchanges,
    seconds_of,
)
from jaxmoe.experiment.measured_kernels.exchange_tables import GPUS, SIDES, even_load
from jaxmoe.experiment.measured_kernels.scores import scores
from jaxmoe.experiment.measured_kernels.tables import read_exchange_folder, read_folder
from jaxmoe.experiment.table import folder_of_tables, script_options
from jaxmoe.files import write_table
from jaxmoe.hardware.gpu.deepep import ExchangeKernel, Links, Load
from jaxmoe.hardware.gpu.deepep_files import beside, write_exchanges
from jaxmoe.hardware.gpu.sheet import sheet_of

HERE = Path(__file__).resolve().parent
SEED = 0
SYSTEMS = ("h100_sxm", "h200_sxm", "b200_sxm", "gb200")
H800 = Links(200e9)  # NVLink of 400 GB/s, data sheet: half of it each way; adapters as in H100's nodes
HIDDEN, CHOICES, EXPERTS, PROCESSORS = 7168, 8, 256, 24

# DeepEP's README at its first version, H800. Low latency: µs of 128 tokens on 1 to 32 nodes. Normal: GB/s of 4,096
# tokens on 1 to 8 nodes, counting copies to a GPU's own node.
LOW_LATENCY = {"dispatch": (77, 118, 155, 173, 192, 194), "combine": (114, 195, 273, 314, 369, 360)}
NORMAL = {"dispatch": (153, 43, 58, 51), "combine": (158, 43, 57, 50)}


def by_processors(fits: Sequence[ExchangeFit]) -> Iterator[dict[str, object]]:
    """Scores of every exchange, and of each number of processors that was held out."""
    for fit, known in zip(fits, exchange_scores(fits), strict=True):
        off = 100 * np.abs(fit.held_out / fit.measured - 1)
        sms = np.unique(fit.load.processors) if fit.known.names["part"] != "avg_t" else ()
        yield known | {f"held_out_sms_{int(each)}": off[fit.load.processors == each].mean() for each in sms}


def kernel_of(fits: Sequence[ExchangeFit], side: str, part: str, nodes: int) -> ExchangeKernel:
    """The fitted exchange that was measured on several nodes, or that of its version within one."""
    known = [fit.known for fit in fits if (fit.known.names["side"], fit.known.names["part"]) == (side, part)]
    several = next(each for each in known if each.names["across"] == "nodes")
    if nodes > 1 or part == "avg_t":
        return several.kernel
    version = several.names["version"]
    return next(each.kernel for each in known if each.names["across"] == "node" and each.names["version"] == version)


def seconds_and_load(
    fits: Sequence[ExchangeFit], side: str, part: str, nodes: int, tokens: int, links: Links
) -> tuple[float, Load]:
    processors = PROCESSORS if part == "transmit" else 132
    load = even_load(side, tokens, HIDDEN, CHOICES, EXPERTS, nodes, processors)
    return float(seconds_of(kernel_of(fits, side, part, nodes), load, links)), load


def first_version(fits: Sequence[ExchangeFit]) -> Iterator[dict[str, object]]:
    """DeepEP's own table beside what the fits of H100 tell of H800's links."""
    for side in SIDES:
        for power, measured in enumerate(LOW_LATENCY[side]):
            told = seconds_and_load(fits, side, "avg_t", 2**power, 128, H800)[0] / MICRO
            yield _row("low latency, µs", side, 2**power, measured, told)
        for power, measured in enumerate(NORMAL[side]):
            told, load = seconds_and_load(fits, side, "transmit", 2**power, 4096, H800)
            yield _row("normal, GB/s", side, 2**power, measured, counted(load) / told / 1e9)


def counted(load: Load) -> float:
    """Bytes as DeepEP counts them: to GPUs of one node, or to nodes, its own included."""
    return float(load.tokens * (load.gpu_copies if load.nodes == 1 else load.node_copies) * load.vector)


def _row(mode: str, side: str, nodes: int, measured: float, told: float) -> dict[str, object]:
    off = 100 * (told / measured - 1)
    return {"mode": mode, "side": side, "ep": GPUS * nodes, "measured": measured, "told": told, "off": off}


def bandwidth(fits: Sequence[ExchangeFit]) -> Iterator[dict[str, object]]:
    """Where the bytes of a normal exchange go: counted, over the network and over links of nodes, GB/s."""
    for side in SIDES:
        for nodes in (1, 2, 4, 8):
            for gpu, links in (("h100", fits[0].links), ("h800", H800)):
                told, load = seconds_and_load(fits, side, "transmit", nodes, 4096, links)
                network = float(load.tokens * load.node_copies * (1 - 1 / nodes) * load.vector)
                inside = float(load.tokens * load.gpu_copies * (1 - 1 / GPUS) * load.vector)
                found = {"counted": counted(load), "network": network, "link": inside}
                rates = {f"{name}_GB_per_s": part / told / 1e9 for name, part in found.items()}
                yield {"side": side, "gpu": gpu, "nodes": nodes, "us": told / MICRO, **rates}


def all_to_alls(folder: Path) -> Iterator[dict[str, object]]:
    """Scores of every all-to-all by its ranks, and of all together, per cent of rows that were held out."""
    tables = [table for table in read_folder(folder) if table.kind.name == "alltoall"]
    fits = calibrate_tables(tables, sheet_of(folder.name), SEED, lambda *_: None)
    names = [(fit.kernel["op_name"], fit.kernel["kernel_source"], fit.kernel["moe_dtype"]) for fit in fits]
    for name, some in [*((name, [fit]) for name, fit in zip(names, fits, strict=True)), (("all", "", ""), fits)]:
        for ranks in np.unique(fits[0].rows["moe_ep_size"]):
            scored = scores(some, [fit.rows["moe_ep_size"] == ranks for fit in some])
            told = {key: scored[key] for key in ("held_out", "error_all", "median", "base", "roofline")}
            yield dict(zip(("operation", "kernel", "precision"), name, strict=True)) | {"ranks": int(ranks)} | told


def main() -> None:
    parser = script_options(__doc__, writes=True)
    parser.add_argument("--data", type=Path, required=True, help="folder of systems, as aiconfigurator lays them out")
    parser.add_argument(
        "--kernels", type=Path, metavar="FOLDER", help="folder of machines' exchanges, kernels/ if none"
    )
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, help="folders of --data, h100_sxm first")
    options = parser.parse_args()
    out = folder_of_tables(HERE, options)
    kernels = options.kernels or out / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    told: list[dict[str, object]] = []
    for system in options.systems:
        fits = fit_exchanges(read_exchange_folder(options.data / system), system)
        write_exchanges(beside(kernels / f"{system}.json"), exchange_file(system, fits))
        told += [{"system": system, **row} for row in by_processors(fits)]
        if system == "h100_sxm":
            write_table(out / "deepep_v1.csv", list(first_version(fits)), digits=3)
            write_table(out / "bandwidth.csv", list(bandwidth(fits)), digits=3)
        if system == "gb200":
            write_table(out / "all_to_all.csv", list(all_to_alls(options.data / system)), digits=3)
    write_table(out / "exchanges.csv", told, digits=3)


if __name__ == "__main__":
    main()
