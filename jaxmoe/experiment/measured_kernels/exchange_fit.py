"""Fits of DeepEP's exchanges, and how far they are off on rows that they were not fitted to.

Held out, stated before the fit: each number of processors of the normal kernels in turn, else every fourth size in
turn.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Bool, Float, Int
from scipy.optimize import least_squares

from jaxmoe.experiment.inputs import OptionError
from jaxmoe.experiment.measured_kernels.exchange_tables import ExchangeTable, exchanges_of, load_of
from jaxmoe.hardware.gpu.deepep import ExchangeKernel, Links, Load, NormalKernel
from jaxmoe.hardware.gpu.deepep_files import FORMS, ExchangeFile, KnownExchange
from jaxmoe.hardware.gpu.sheet import sheet_of

MICRO, NANO = 1e-6, 1e-9
FOLDS = 4
OUTLIER = 0.05  # error beyond which a row counts linearly
PULL = 0.02  # of a number to where it starts, in errors a unit of its logarithm
FAR = 6.0  # from where it starts no number goes further
INTERVAL = (0.05, 0.95)
LEAST_RATIO, MOST_RATIO = 0.3, 300.0  # of measured times over those of bytes on links: beyond, the unit is another
SOURCE = "measured tables of ai-dynamo/aiconfigurator 095f58a5 (Apache-2.0)"

# Where fits start, and where numbers stay that rows do not tell.
STARTS: dict[str, dict[str, float]] = {
    "transmit": {
        "launch": 20 * MICRO,
        "hop": 5 * MICRO,
        "first": 0.4 * NANO,
        "reach": 0.2 * NANO,
        "fill": 15 * MICRO,
        "chunk": 10.0,
        "gpu_copy": 0.05 * MICRO,
        "gpu_byte": 0.02 * NANO,
        "node_copy": 0.05 * MICRO,
        "node_byte": 0.02 * NANO,
        "overlap": 3.0,
    },
    "notify": {"launch": 12 * MICRO, "hop": 20 * MICRO, "late": 12 * MICRO, "many": 500.0, "scan": 0.05 * MICRO},
    "avg_t": {
        "launch": 8 * MICRO,
        "expert": 7 * NANO,
        "crowd": MICRO,
        "away": 10 * MICRO,
        "hop": 3 * MICRO,
        "first": 0.02 * NANO,
        "token": MICRO,
        "token_byte": 0.1 * NANO,
        "overlap": 2.0,
        "wait": 1.0,
        "wait_away": 0.3,
    },
}
RATES = {"link": 0.7, "network": 0.9}  # parts of a data sheet's


@dataclass(frozen=True)
class ExchangeFit:
    """A fitted exchange with the rows it comes from: seconds `measured` and, where held out, `held_out`."""

    known: KnownExchange
    load: Load
    links: Links
    measured: Float[np.ndarray, " row"]
    held_out: Float[np.ndarray, " row"]


def fitted(
    start: ExchangeKernel,
    load: Load,
    measured: Float[np.ndarray, " row"],
    links: Links,
    rows: Bool[np.ndarray, " row"],
    kept: Sequence[str] = (),
) -> ExchangeKernel:
    """The kernel of some `rows` by robust least squares of logarithms; numbers of `kept` names stay at the start."""
    numbers, unravel = ravel_pytree(start)
    first, log = np.asarray(numbers, float), np.log(measured)
    pull = np.where([name in kept for name in start.__dataclass_fields__], 1.0, PULL)

    def at(numbers: np.ndarray) -> ExchangeKernel:
        return unravel(jnp.asarray(numbers, jnp.float32))

    found = least_squares(
        lambda x: np.concatenate([rows * (np.asarray(_log_seconds(at(x), load, links)) - log), pull * (x - first)]),
        first,
        lambda x: np.concatenate([rows[:, None] * np.asarray(_slopes(at(x), load, links)), np.diag(pull)]),
        bounds=(first - FAR, first + FAR),
        loss="soft_l1",
        f_scale=OUTLIER,
        max_nfev=300,
    )
    return at(found.x)


def seconds_of(kernel: ExchangeKernel, load: Load, links: Links) -> Float[np.ndarray, "..."]:
    """Seconds of loads."""
    return np.exp(np.asarray(_log_seconds(kernel, load, links), float))


@jax.jit
def _log_seconds(kernel: ExchangeKernel, load: Load, links: Links) -> jax.Array:
    return jnp.log(kernel.seconds(load, links))


@jax.jit
def _slopes(kernel: ExchangeKernel, load: Load, links: Links) -> jax.Array:
    return jnp.stack(jax.tree.leaves(jax.jacfwd(_log_seconds)(kernel, load, links)), axis=-1)


def _folds(table: ExchangeTable, rows: Int[np.ndarray, " row"], side: str) -> np.ndarray:
    """The fold of each row: one for each number of processors, or by size."""
    name = f"{side}_sms"
    if table.mode == "normal" and len(np.unique(table.columns[name][rows])) > 1:
        return np.unique(table.columns[name][rows], return_inverse=True)[1].ravel()
    return np.unique(table.columns["num_token"][rows], return_inverse=True)[1].ravel() % FOLDS


def fit_exchanges(tables: Sequence[ExchangeTable], system: str) -> list[ExchangeFit]:
    """Every exchange of these tables, those within a node first: what more nodes do not tell starts from there.

    A link within a node is the same one with more nodes, where its rate is no limit, and the same one both ways: a
    combine tells its rate, as its vectors are twice as long. Raises `OptionError` for times in another unit, or of one
    size alone.
    """
    sheet, links = sheet_of(system), links_of(system)
    found: list[ExchangeFit] = []
    for table, names, rows in sorted(exchanges_of(tables), key=_combines_of_a_node_first):
        column = table.column(names["side"], names["part"])
        rows = rows[table.columns[column][rows] > 0]
        load = Load(*(part[rows] for part in load_of(table, names["side"], int(sheet.processors), sheet.node)))
        measured = table.columns[column][rows] * MICRO
        if names["part"] != "notify":
            _check_unit(table, column, load, links, measured)
        start = _start(names, found)
        tells = (names["side"], names["across"]) == ("combine", "node")
        kept = ("link",) if names["part"] == "transmit" and not tells else ()
        told = np.full(len(measured), np.nan)
        folds = _folds(table, rows, names["side"])
        if not folds.any():
            raise OptionError(f"{table.path}: has one size alone on {names['across']}; measure more of them")
        for fold in np.unique(folds):
            left = folds == fold
            kernel = fitted(start, load, measured, links, ~left, kept)
            told[left] = seconds_of(kernel, load, links)[left]
        kernel = fitted(start, load, measured, links, np.ones(len(measured), bool), kept)
        low, high = np.quantile(measured / told, INTERVAL)
        error = {"rows": len(measured), "held_out_error": float(f"{np.abs(told / measured - 1).mean():.3g}")}
        found.append(
            ExchangeFit(KnownExchange(names, kernel, (float(low), float(high)), error), load, links, measured, told)
        )
    return found


def _combines_of_a_node_first(group: tuple[ExchangeTable, Mapping[str, str], np.ndarray]) -> tuple[str, int, str]:
    _, names, rows = group
    return names["across"], -len(rows), names["side"]


def _start(names: Mapping[str, str], found: Sequence[ExchangeFit]) -> ExchangeKernel:
    """The kernel of the same side with the most rows, else usual numbers with the link of the other side."""
    near = [fit.known for fit in found if all(fit.known.names[key] == names[key] for key in ("side", "part"))]
    if near:
        return max(near, key=lambda known: known.told["rows"]).kernel
    start = _usual(names)
    links = {
        fit.known.told["rows"]: fit.known.kernel.link for fit in found if isinstance(fit.known.kernel, NormalKernel)
    }
    if isinstance(start, NormalKernel) and links:
        return eqx.tree_at(lambda kernel: kernel.link, start, links[max(links)])
    return start


def _usual(names: Mapping[str, str]) -> ExchangeKernel:
    form, numbers = FORMS[names["part"]], STARTS[names["part"]]
    first = {name: np.log(value) for name, value in numbers.items()}
    first |= {name: np.log(part / (1 - part)) for name, part in RATES.items() if name in form.__dataclass_fields__}
    return form(**{name: jnp.float32(value) for name, value in first.items()})


def _check_unit(table: ExchangeTable, column: str, load: Load, links: Links, measured: np.ndarray) -> None:
    """Raise `OptionError` where what passes the links takes a time of another order than their rates say."""
    outside = load.tokens * (load.node_copies - 1) * load.vector / links.network
    least = np.maximum(np.maximum(load.tokens * load.vector / links.link, outside), MICRO)  # of a few bytes a launch
    most = least >= np.quantile(least, 0.9)
    ratio = float(np.median(measured[most] / least[most]))
    if not LEAST_RATIO < ratio < MOST_RATIO:
        raise OptionError(
            f"{table.path}: the rows with the most tokens take {ratio:.3g} times as long in {column} as their bytes "
            "on the data sheet's links; write us"
        )


def links_of(system: str) -> Links:
    """Links of a GPU by its data sheet."""
    return Links(float(sheet_of(system).link))


def exchange_file(system: str, fits: Sequence[ExchangeFit]) -> ExchangeFile:
    """The part of fits that a machine keeps."""
    rows = sum(len(fit.measured) for fit in fits)
    known, sheet = tuple(fit.known for fit in fits), sheet_of(system)
    source = f"{SOURCE}: {system}, {rows} times"
    return ExchangeFile(system, source, links_of(system), int(sheet.processors), known, sheet.node)


def exchange_scores(fits: Sequence[ExchangeFit]) -> Iterator[dict[str, object]]:
    """Errors of every exchange, per cent: held out, with their median, and of the fit.

    `link_of_rate` and `network_of_rate` are the parts of a data sheet's rates that are reached.
    """
    for fit in fits:
        names, off = fit.known.names, np.abs(fit.held_out / fit.measured - 1)
        fitted_to = seconds_of(fit.known.kernel, fit.load, fit.links)
        yield {
            **{name: names[name] for name in ("version", "across", "side", "part")},
            "rows": len(off),
            "held_out": _percent(off.mean()),
            "median": _percent(np.median(off)),
            "fit": _percent(np.abs(fitted_to / fit.measured - 1).mean()),
            **{f"{name}_of_rate": _rate(fit.known.kernel, name) for name in ("link", "network")},
        }


def _percent(part: float) -> float:
    return float(f"{100 * part:.3g}")


def _rate(kernel: ExchangeKernel, name: str) -> object:
    return _percent(float(jax.nn.sigmoid(getattr(kernel, name)))) if hasattr(kernel, name) else ""
