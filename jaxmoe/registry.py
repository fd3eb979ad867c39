"""Open parts by name: those of this package, those registered in code, and those of installed packages.

    @METRICS.register("idle")
    def idle(outcome): ...

A package of one's own names its parts in its `pyproject.toml`, and they are there once it is installed:

    [project.entry-points."jaxmoe.metrics"]
    idle = "my_package.metrics:idle"

Names are listed without importing any part; a part is imported when it is asked for. A name may be a template, which
stands for a family of parts: `rings_{2x4}` for any text without an underscore in place of the example 2x4, or
`rings_{2x4:[0-9x]+}` for what a regular expression matches.
"""

import difflib
import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any, Generic, TypeVar

from jaxmoe.errors import InputError

Part = TypeVar("Part")
Registered = TypeVar("Registered")

_HOLE = re.compile(r"\{(?P<example>\w+)(?::(?P<pattern>[^{}]+))?\}")


class UnknownPartError(InputError):
    """A name that no part has, with the closest and all known names and how to add one."""


class PartError(InputError):
    """A part that cannot be used: registered twice, broken, or made for a newer interface."""


class Registry(Mapping[str, Part], Generic[Part]):
    """Parts of one kind by name, in the order in which they were registered; those of installed packages come last.

    `builtin` are parts of this package that are imported when they are first used, as `module:attribute`. A part may
    state the format of the interface that it was written for as its attribute `interface`; `interface` of the registry
    is the newest that this version of jaxmoe knows.
    """

    def __init__(self, kind: str, group: str, builtin: Mapping[str, str] | None = None, interface: int = 1) -> None:
        self.kind, self.group, self.interface = kind, group, interface
        self._parts: dict[str, Part] = {}
        self._lazy: dict[str, str] = dict(builtin or {})
        self._order: dict[str, None] = dict.fromkeys(self._lazy)

    def register(self, name: str, part: object = None) -> Any:
        """Register a part under a name: as a decorator, or at once where the part is given.

        Raises `PartError` for a name that is taken.
        """

        def add(registered: Registered) -> Registered:
            if name in self._order:
                raise PartError(f"{self.kind} {name!r} is registered already; give yours another name")
            self._checked(name, registered)
            self._parts[name] = registered  # type: ignore[assignment]
            self._order[name] = None
            return registered

        return add if part is None else add(part)

    def remove(self, name: str) -> None:
        """Forget a part that was registered in code."""
        del self._order[name], self._parts[name]

    def __getitem__(self, name: str) -> Part:
        """The part of this name. Raises `UnknownPartError`, and `PartError` for one that cannot be imported."""
        return self._loaded(self.entry(name))

    def entry(self, name: str) -> str:
        """The name that a part is registered under: the name itself, or the template that it fits.

        Raises `UnknownPartError` where there is none. Imports nothing.
        """
        found = self._found(name)
        if found is None:
            raise UnknownPartError(self._unknown(name))
        return found

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._found(name) is not None

    def __iter__(self) -> Iterator[str]:
        """All names, templates as they are registered."""
        yield from self._order
        yield from (name for name in self._installed if name not in self._order)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def names(self) -> tuple[str, ...]:
        """All names that stand for one part: no templates."""
        return tuple(name for name in self if not _is_template(name))

    @property
    def builtin(self) -> tuple[str, ...]:
        """The names of parts of this package, for which no other one is looked through."""
        return tuple(self._lazy)

    @property
    def added(self) -> tuple[str, ...]:
        """The names of parts that are not of this package."""
        return tuple(name for name in self if name not in self._lazy)

    def name_of(self, part: object) -> str | None:
        """The one name that a part was registered under; `None` for one of several names, or that is not loaded."""
        names = [name for name, each in self._parts.items() if each is part]
        return names[0] if len(names) == 1 else None

    def shown(self) -> str:
        """All names for people, with an example of every family."""
        return ", ".join(example_of(name) + " and its like" * _is_template(name) for name in self)

    def _found(self, name: str) -> str | None:
        if name in self._order:
            return name
        # Packages are looked through only where nothing else has the name.
        known = next((each for each in self._order if _fits(each, name)), None)
        if known is not None:
            return known
        return name if name in self._installed else next((each for each in self._installed if _fits(each, name)), None)

    @property
    def _installed(self) -> dict[str, EntryPoint]:
        """Entry points of installed packages by name. Raises `PartError` where two have the same name."""
        found: dict[str, EntryPoint] = {}
        for entry in _entry_points(self.group, tuple(sys.path)):
            if entry.name in self._order:
                if entry.name in self._parts and self._of_package(entry) is self._parts[entry.name]:
                    continue  # its module registers it as well
                raise PartError(
                    f"{self.kind} {entry.name!r} of {_package(entry)} has the name of one that is there already; "
                    f"rename or uninstall it"
                )
            if entry.name in found:
                both = f"{_package(found[entry.name])} and {_package(entry)}"
                raise PartError(f"{self.kind} {entry.name!r} is named by {both}; uninstall one of them")
            found[entry.name] = entry
        return found

    def _loaded(self, name: str) -> Part:
        if name not in self._parts:
            if name in self._lazy:
                module, _, attribute = self._lazy[name].partition(":")
                part = getattr(importlib.import_module(module), attribute)
            else:
                part = self._of_package(self._installed[name])
            self._checked(name, part)
            self._parts[name] = part
        return self._parts[name]

    def _of_package(self, entry: EntryPoint) -> Any:
        try:
            return entry.load()
        except Exception as error:  # whatever the package's own code raises
            raise PartError(
                f"{self.kind} {entry.name!r} of {_package(entry)} cannot be imported from {entry.value} "
                f"({type(error).__name__}: {error}); repair or uninstall that package"
            ) from error

    def _checked(self, name: str, part: object) -> None:
        stated = getattr(part, "interface", 1)
        if not isinstance(stated, int) or stated < 1:
            raise PartError(f"{self.kind} {name!r} states interface {stated!r}, expected a whole number from 1")
        if stated > self.interface:
            raise PartError(
                f"{self.kind} {name!r} is written for interface {stated}, and this jaxmoe knows {self.interface}; "
                "install a newer jaxmoe or an older version of the part"
            )

    def _unknown(self, name: str) -> str:
        close = difflib.get_close_matches(name, self.names, n=3)
        near = f" (did you mean {' or '.join(close)}?)" if close else ""
        return (
            f"{self.kind} is {name!r}{near}, expected one of {self.shown()}; add one by a registration in code, or "
            f"by an entry point {self.group!r} of a package of yours"
        )


@lru_cache(maxsize=64)
def _entry_points(group: str, path: tuple[str, ...]) -> EntryPoints:
    """Entry points of the packages on a search path: to read them takes milliseconds."""
    return entry_points(group=group)


def example_of(name: str) -> str:
    """A name that stands for one part: the name itself, or the example of a template."""
    return _HOLE.sub(r"\g<example>", name)


def _is_template(name: str) -> bool:
    return _HOLE.search(name) is not None


@lru_cache(maxsize=1024)
def _fits(template: str, name: str) -> bool:
    """Whether a name is of the family that a template stands for."""
    if not _is_template(template):
        return False
    pattern, end = "", 0
    for hole in _HOLE.finditer(template):
        pattern += re.escape(template[end : hole.start()]) + f"(?:{hole['pattern'] or '[^_]+'})"
        end = hole.end()
    return re.fullmatch(pattern + re.escape(template[end:]), name) is not None


def _package(entry: EntryPoint) -> str:
    """The package that names an entry point, for people."""
    return "an installed package" if entry.dist is None else f"package {entry.dist.name}"


# The open parts of this package. What a part of each kind is, says the module that is named there. Exchanges are in
# `jaxmoe.placement.exchange`, where their names are made, and those of the simulator in `jaxmoe.des.exchanges`.


def _attributes(module: str, names: Mapping[str, str]) -> dict[str, str]:
    return {name: f"jaxmoe.{module}:{attribute}" for name, attribute in names.items()}


def _modules(package: str, names: Iterable[str], attribute: str) -> dict[str, str]:
    return {name: f"jaxmoe.{package}.{name}:{attribute}" for name in names}


# Formats of JSON come last: to look at them, the whole file is read.
TRACES: Registry[Any] = Registry(
    "trace format",
    "jaxmoe.traces",
    _modules(
        "traces.formats",
        ("npz", "tensorrt_llm", "flame_moe", "megatron", "hd_moe", "data_movement", "vllm", "sglang"),
        "TRACE",
    ),
)
LOADS: Registry[Any] = Registry(
    "format of load counts",
    "jaxmoe.loads",
    _modules("traces.formats", ("npz", "sglang", "tensorrt_llm", "vllm", "bare_counts"), "LOAD_COUNTS"),
)
ENGINES: Registry[Any] = Registry(
    "placement file",
    "jaxmoe.placement_files",
    _attributes(
        "placement.engine_formats",
        {
            "eplb": "EPLB_FILE",
            "sglang": "SGLANG_FILE",
            "vllm_ascend": "VLLM_ASCEND_FILE",
            "tensorrt_llm": "TENSORRT_LLM_FILE",
            "vllm": "VLLM_FILE",
        },
    ),
)
_CUT = "[1-9][0-9]*(?:x[1-9][0-9]*)?"
STRATEGIES: Registry[Any] = Registry(
    "placement strategy",
    "jaxmoe.strategies",
    _attributes(
        "placement.named",
        {
            "tp": "TP",
            "tp_both_ways": "TP_BOTH_WAYS",
            "ep_random": "EP_RANDOM",
            "ep_balanced": "EP_BALANCED",
            "ep": "EP",
            "hybrid": "HYBRID",
            "hybrid_ring": "HYBRID_RING",
            "hybrid_complete": "HYBRID_COMPLETE",
            "ep_runs": "EP_RUNS",
            f"regions_{{1x2:{_CUT}}}_{{tp:tp|ep|hybrid_{_CUT}}}": "REGIONS",
        },
    ),
)
# Classes of networks, and functions that make one.
TOPOLOGIES: Registry[Any] = Registry(
    "topology",
    "jaxmoe.topologies",
    _attributes(
        "hardware",
        {
            "mesh": "Mesh",
            "wafers": "wafers",
            "torus": "torus",
            "ring": "ring",
            "switch": "switch",
            "fully_connected": "fully_connected",
            "clusters": "clusters",
            "graph": "Graph",
        },
    ),
)
KERNEL_MODELS: Registry[Any] = Registry(
    "kernel model",
    "jaxmoe.kernel_models",
    {
        **_attributes("hardware.kernels", {"tiled": "TiledGemm", "measured": "MeasuredGemm"}),
        **_attributes("hardware.gpu.fused", {"fitted": "FusedGemm"}),
    },
)
OPTIMISERS: Registry[Any] = Registry(
    "optimiser",
    "jaxmoe.optimisers",
    _attributes(
        "tune.optimisers",
        {
            "gradient": "GRADIENT",
            "milp-bayes": "MILP_BAYES",
            "anneal": "ANNEAL",
            "greedy": "GREEDY",
            "random": "RANDOM",
        },
    ),
)
METRICS: Registry[Any] = Registry(
    "metric",
    "jaxmoe.metrics",
    _attributes(
        "experiment.metrics",
        {
            "total": "TOTAL",
            "p95": "P95",
            "dispatch": "DISPATCH",
            "compute": "COMPUTE",
            "combine": "COMBINE",
            "utilisation": "UTILISATION",
            "communication_share": "COMMUNICATION_SHARE",
            "busiest": "BUSIEST",
            "energy": "ENERGY",
            "energy_per_token": "ENERGY_PER_TOKEN",
            "area": "AREA",
            "price": "PRICE",
        },
    ),
)
