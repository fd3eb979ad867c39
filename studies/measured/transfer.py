"""How far off are kernels of a GPU that was not fitted, by its data sheet alone and with 20 rows? See README.md.

    python studies/measured/transfer.py --data ../shared/measured/gpu

Takes a machine's fitted kernels to another GPU, a minute or two on two cores, and writes transfer.csv: for each kernel
that both have, and for the others by the one that stands in, errors by data sheet alone and with 20 rows of each kind,
backend and precision, evenly spaced in the order of their told times.
"""

from pathlib import Path

import numpy as np

from jaxmoe.config.files import find_kernels
from jaxmoe.experiment.measured_kernels.calibration import KernelFit
from jaxmoe.experiment.measured_kernels.scores import precision_of
from jaxmoe.experiment.measured_kernels.tables import read_folder
from jaxmoe.experiment.measured_kernels.transfer import transfer_tables
from jaxmoe.experiment.table import folder_of_tables, script_options
from jaxmoe.files import write_table
from jaxmoe.hardware.gpu.files import KernelFile, at_sheet, read_kernels

HERE = Path(__file__).resolve().parent


def row_of(fit: KernelFit, base: KernelFile) -> dict[str, object]:
    """Errors of one kernel, per cent."""
    judged = np.isfinite(fit.held_out)

    def error(told: np.ndarray) -> float:
        return float(f"{100 * np.abs(told / fit.measured - 1)[judged].mean():.3g}")

    return {
        "kind": fit.kind.name,
        "backend": fit.kernel.get("framework", ""),
        "precision": precision_of(fit),
        "kernel": fit.kernel["kernel_source"],
        "on_both": any(dict(fit.kernel) == dict(kernel.names) for kernel in base.of_kind(fit.kind.name)),
        "rows": len(judged),
        "given": int((~judged).sum()),
        "roofline": error(fit.roofline),
        "data_sheet": error(fit.base),
        "with_rows": error(fit.held_out),
    }


def main() -> None:
    parser = script_options(__doc__, writes=True)
    parser.add_argument("--data", type=Path, required=True, help="folder of systems, as aiconfigurator lays them out")
    parser.add_argument("--from", dest="base", default="h200_sxm", help="the GPU whose fitted kernels are taken")
    parser.add_argument("--to", default="b200_sxm", help="the GPU whose tables judge them")
    options = parser.parse_args()
    base = at_sheet(read_kernels(find_kernels(f"kernels/{options.base}.json")), options.to)
    fits = transfer_tables(read_folder(options.data / options.to), base, lambda *_: None)
    rows = [{"from": options.base, "to": options.to, **row_of(fit, base)} for fit in fits]
    write_table(folder_of_tables(HERE, options) / "transfer.csv", rows)


if __name__ == "__main__":
    main()
