"""How far fitted kernels are off on rows that they were not fitted to, by group, beside a roofline and a floor."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Float

from jaxmoe.experiment.measured_kernels.calibration import KernelFit, decades, intervals_of
from jaxmoe.experiment.measured_kernels.kinds import grouped

PRECISIONS = ("gemm_dtype", "moe_dtype", "attn_dtype", "gemm_type", "kv_cache_dtype", "nccl_dtype", "allreduce_dtype")


def precision_of(fit: KernelFit) -> str:
    """The precisions of a kernel, as its table names them."""
    return "/".join(dict.fromkeys(fit.kernel[name] for name in PRECISIONS if name in fit.kernel))


def by_kernel(fits: Iterable[KernelFit]) -> Iterator[dict[str, object]]:
    """Scores of every kernel: in all, and by decade of its size."""
    for fit in fits:
        names = {
            "kind": fit.kind.name,
            "backend": fit.kernel.get("framework", ""),
            "version": fit.kernel.get("version", ""),
            "operation": fit.kernel.get("op_name", ""),
            "kernel": fit.kernel["kernel_source"],
            "precision": precision_of(fit),
        }
        decade = decades(fit.size)
        yield {**names, "size_from": "", **scores([fit], [np.ones(len(decade), bool)])}
        for each in np.unique(decade):
            yield {**names, "size_from": 10 ** int(each), **scores([fit], [decade == each])}


def by_kind(fits: Sequence[KernelFit]) -> Iterator[dict[str, object]]:
    """Scores of every kind and backend, all kernels together."""
    groups = dict.fromkeys((fit.kind.name, fit.kernel.get("framework", "")) for fit in fits)
    for kind, backend in groups:
        some = [fit for fit in fits if (fit.kind.name, fit.kernel.get("framework", "")) == (kind, backend)]
        yield {"kind": kind, "backend": backend, **scores(some, [np.ones(len(fit.measured), bool) for fit in some])}


def scores(fits: Sequence[KernelFit], rows: Sequence[Bool[np.ndarray, " row"]]) -> dict[str, object]:
    """Scores of held-out rows, per cent: means and medians of absolute errors, and the part that intervals cover.

    `error` is of rows that are in no slow series, `error_all` and `median` of all. `shapes` says whether they are of
    shapes that were not fitted.
    """

    def joined(name: str) -> Float[np.ndarray, " row"]:
        return np.concatenate([np.asarray(getattr(fit, name), float)[at] for fit, at in zip(fits, rows, strict=True)])

    measured, told = joined("measured"), joined("held_out")
    known, slow = np.isfinite(told), joined("slow") > 0
    usual = known & ~slow
    inside = np.concatenate([_covered(fit)[at] for fit, at in zip(fits, rows, strict=True)])

    def error(name: str, some: np.ndarray, middle: bool = False) -> object:
        off = np.abs(joined(name)[some] / measured[some] - 1)
        off = off[np.isfinite(off)]
        return float(f"{100 * (np.median(off) if middle else off.mean()):.3g}") if len(off) else ""

    judged = usual & np.isfinite(inside)
    return {
        "rows": len(measured),
        "held_out": int(known.sum()),
        "shapes": all(fit.of_shapes for fit in fits),
        "slow": int(slow.sum()),
        "repeats": int(joined("repeated").sum()),
        "error": error("held_out", usual),
        "error_all": error("held_out", known),
        "median": error("held_out", known, middle=True),
        "base": error("base", usual),
        "roofline": error("roofline", usual),
        "floor": error("floor", usual),
        "covered": float(f"{100 * inside[judged].mean():.3g}") if judged.any() else "",
    }


def _covered(fit: KernelFit) -> Float[np.ndarray, " row"]:
    """1 where a held-out row is within an interval that was made from the other half of the held-out shapes."""
    names = [name for name in fit.kind.shape if name in fit.rows]
    codes = grouped(fit.rows, names)[1]
    known = np.isfinite(fit.held_out)
    half = np.full(len(codes), -1)
    for rank, code in enumerate(np.unique(codes[known])):
        half[codes == code] = rank % 2
    inside, ratio = np.full(len(codes), np.nan), fit.measured / fit.held_out
    for side in (0, 1):
        made = known & ~fit.slow & (half == 1 - side)
        judged = known & (half == side)
        intervals = np.array(intervals_of(fit.size[made], ratio[made], codes[made]))
        if not len(intervals) or not judged.any():
            continue
        at = np.maximum(np.searchsorted(intervals[:, 0], fit.size[judged], side="right") - 1, 0)
        inside[judged] = (intervals[at, 1] <= ratio[judged]) & (ratio[judged] <= intervals[at, 2])
    return inside
