"""Given traffic: its matrices from a file, and how long they take by time models and in the event simulator."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.des import Fabric, replay_traffic
from jaxmoe.des.traffic import Order
from jaxmoe.experiment.inputs import OptionError
from jaxmoe.hardware import AbstractTopology
from jaxmoe.network import Congestion, Uncongested, alpha_beta
from jaxmoe.relax import HardMax

LARGEST = 1e24  # B: no traffic comes near it, and times stay within 32 bits
Matrices = Mapping[str, Float[np.ndarray, "node node2"]]


@dataclass(frozen=True)
class Prediction:
    """Completion times of every matrix by each time model, s, and busy times by the congestion model, `model`, s."""

    completion: dict[str, Float[np.ndarray, " matrix"]]  # by time model: model, uncongested, alpha_beta
    link_time: Float[np.ndarray, "matrix link"]
    port_time: Float[np.ndarray, "matrix port"]  # ports that send, then ports that receive, where they are limited


@dataclass(frozen=True)
class TrafficLoads:
    """Bytes that every matrix sends, receives and puts on each link, exact. A node's traffic to itself is left out."""

    sent: Float[np.ndarray, "matrix node"]
    received: Float[np.ndarray, "matrix node"]
    link: Float[np.ndarray, "matrix link"]

    @property
    def total(self) -> Float[np.ndarray, " matrix"]:
        return self.sent.sum(axis=1)

    @property
    def hops(self) -> Float[np.ndarray, " matrix"]:
        """Bytes times the links they pass."""
        return self.link.sum(axis=1)


def read_matrices(path: Path, nodes: int) -> dict[str, Float[np.ndarray, "node node2"]]:
    """Bytes from every source, a row, to every destination, a column, by name; in the order of the file.

    Diagonals, which are free, are set to zero. Raises `OptionError` naming the file, the key and what is wrong.
    """
    arrays = _read_npz(path)
    if not arrays:
        raise OptionError(f"{path}: holds no arrays; expected traffic matrices of {nodes}x{nodes} bytes")
    return {name: _checked(f"{path}: {name}", array, nodes) for name, array in arrays.items()}


def predict(model: Congestion, topology: AbstractTopology, matrices: Matrices) -> Prediction:
    """Evaluate all time models on all matrices in one call."""
    traffic = jnp.asarray(np.stack(list(matrices.values())), jnp.float32)
    completion, link_time, port_time = jax.tree.map(
        lambda leaf: np.asarray(leaf, float), _evaluate(model, topology, traffic)
    )
    return Prediction(completion, link_time, port_time)


@eqx.filter_jit
def _evaluate(
    model: Congestion, topology: AbstractTopology, traffic: Float[Array, "matrix node node2"]
) -> tuple[dict[str, Float[Array, " matrix"]], Float[Array, "matrix link"], Float[Array, "matrix port"]]:
    pairwise = {"uncongested": Uncongested(), "alpha_beta": alpha_beta(topology, pipelined=model.cut_through)}

    def one(matrix: Float[Array, "node node2"]):
        stage = model(topology, matrix)
        completion = {"model": stage.total(HardMax())}
        completion |= {name: other(topology, matrix).total(HardMax()) for name, other in pairwise.items()}
        return completion, stage.link_time, stage.port_time

    return jax.vmap(one)(traffic)


def simulate(
    fabric: Fabric, matrices: Matrices, order: Order, seed: int, report: Callable[[int, int], None]
) -> Float[np.ndarray, " matrix"]:
    """Replay every matrix, s; `report` is called with the matrices done and those in all."""
    completion = np.zeros(len(matrices))
    for index, matrix in enumerate(matrices.values()):
        completion[index] = replay_traffic(fabric, matrix, order, seed).completion_s
        report(index + 1, len(matrices))
    return completion


def loads_of(fabric: Fabric, matrices: Matrices) -> TrafficLoads:
    """Count bytes along the paths that messages take, B."""
    pair, link = fabric.routes.rows.owner, fabric.routes.rows.items
    traffic = list(matrices.values())
    return TrafficLoads(
        sent=np.stack([matrix.sum(axis=1) for matrix in traffic]),
        received=np.stack([matrix.sum(axis=0) for matrix in traffic]),
        link=np.stack([np.bincount(link, matrix.ravel()[pair], fabric.num_links) for matrix in traffic]),
    )


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file:
            head = file.read(2)
        if head != b"PK":
            what = "another kind of file" if head else "empty"
            raise OptionError(f"{path}: is {what}; expected an npz of traffic matrices, as numpy.savez writes it")
        with np.load(path, allow_pickle=False) as file:
            return {name: np.asarray(file[name]) for name in file.files}
    except FileNotFoundError:
        raise OptionError(f"{path}: no such file; give an npz of traffic matrices with --traffic") from None
    # What a damaged archive raises depends on where it is damaged.
    except (OSError, ValueError, BadZipFile, EOFError, zlib.error, RuntimeError, KeyError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(f"{path}: not a readable npz ({error}); write it again with numpy.savez") from None


def _checked(label: str, array: np.ndarray, nodes: int) -> Float[np.ndarray, "node node2"]:
    """The matrix in float64 without its diagonal; `label` names file and key."""
    if array.shape != (nodes, nodes):
        raise OptionError(
            f"{label} has shape {array.shape}, expected ({nodes}, {nodes}): the network has {nodes} nodes; "
            "remove the array from the file, or describe a network of its size"
        )
    if array.dtype.kind not in "iuf":
        raise OptionError(f"{label} holds values of type {array.dtype}, expected whole or floating-point numbers")
    traffic = array.astype(float)
    wrong = np.argwhere(~((traffic >= 0) & (traffic <= LARGEST)))
    if len(wrong):
        source, destination = wrong[0].tolist()
        raise OptionError(
            f"{label}[{source}, {destination}] is {traffic[source, destination]:g}, "
            f"expected bytes: zero or more, and at most {LARGEST:g}"
        )
    np.fill_diagonal(traffic, 0)
    return traffic
