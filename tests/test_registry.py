"""Registries of open parts: names, templates, installed packages, and what is told where something is wrong."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from jaxmoe import registry
from jaxmoe.errors import InputError
from jaxmoe.registry import PartError, Registry, UnknownPartError

GROUP = "jaxmoe.colours"


@pytest.fixture
def colours():
    return Registry("colour", GROUP, {"red": "fractions:Fraction", "blue": "decimal:Decimal"})


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Make a package with entry points `{name: module:attribute}` and the source of that module, and find it."""

    def made(entries: dict[str, str], package: str = "paint", source: str = "green = 3\n") -> None:
        folder = tmp_path / package
        info = folder / f"{package}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"[{GROUP}]", *(f"{name} = {value}" for name, value in entries.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        (folder / f"{package}_parts.py").write_text(source)
        monkeypatch.syspath_prepend(str(folder))

    return made


def test_parts_of_the_package_are_imported_when_they_are_asked_for():
    lazy = Registry("colour", GROUP, {"red": "no.such.module:RED"})
    assert list(lazy) == ["red"]
    assert "red" in lazy
    with pytest.raises(ModuleNotFoundError):
        lazy["red"]


def test_a_part_is_registered_by_a_decorator_or_a_call(colours):
    @colours.register("green")
    def green():
        return 3

    colours.register("grey", 7)
    assert (colours["green"], colours["grey"]) == (green, 7)
    assert tuple(colours) == ("red", "blue", "green", "grey")
    colours.remove("grey")
    assert "grey" not in colours


@pytest.mark.parametrize("name", ["red", "green"])
def test_a_name_is_given_once(colours, name):
    colours.register("green", 3)
    with pytest.raises(PartError, match=f"colour '{name}' is registered already; give yours another name"):
        colours.register(name, 4)


def test_an_unknown_name_is_told_with_the_closest_and_all_others(colours):
    with pytest.raises(UnknownPartError) as error:
        colours["bleu"]
    told = str(error.value)
    assert told.startswith("colour is 'bleu' (did you mean blue?), expected one of red, blue; add one by")
    assert GROUP in told
    assert isinstance(error.value, InputError)
    assert "bleu" not in colours


def test_templates_stand_for_families(colours):
    colours.register("grey_{50:[0-9]+}", "a grey")
    colours.register("mix_{red}_{blue}", "a mix")
    assert colours["grey_50"] == "a grey"
    assert colours["mix_red_blue"] == "a mix"
    assert colours.entry("grey_50") == "grey_{50:[0-9]+}"
    assert [name in colours for name in ("grey_", "grey_light", "grey_50x", "mix_red", "mix_a_b_c")] == [False] * 5
    assert colours.names == ("red", "blue")
    assert colours.shown() == "red, blue, grey_50 and its like, mix_red_blue and its like"


def test_installed_packages_are_found_and_imported_when_asked_for(colours, install):
    install({"green": "paint_parts:green", "broken": "paint_parts:no_such"})
    sys.modules.pop("paint_parts", None)
    assert tuple(colours) == ("red", "blue", "green", "broken")
    assert "paint_parts" not in sys.modules
    assert colours["green"] == 3
    with pytest.raises(PartError, match="colour 'broken' of package paint cannot be imported from paint_parts:no_such"):
        colours["broken"]


def test_templates_of_packages(colours, install):
    install({"shade_{50}": "paint_parts:green"})
    assert colours["shade_7"] == 3


def test_packages_are_looked_through_only_for_other_names(colours, monkeypatch):
    monkeypatch.setattr(registry, "_entry_points", lambda *given: pytest.fail("looked through packages"))
    assert colours["red"] is not None
    assert "blue" in colours


def test_a_package_that_cannot_be_imported_is_named(colours, install):
    install({"green": "paint_parts:green"}, source="import no_such_package\n")
    sys.modules.pop("paint_parts", None)
    with pytest.raises(PartError, match=r"'green' of package paint .*ModuleNotFoundError.*repair or uninstall"):
        colours["green"]


def test_a_package_has_no_name_that_is_taken(colours, install):
    install({"red": "paint_parts:green"})
    with pytest.raises(PartError, match="colour 'red' of package paint has the name of one that is there already"):
        list(colours)


def test_a_package_may_register_what_it_names(colours, install, monkeypatch):
    monkeypatch.setattr(registry, "COLOURS", colours, raising=False)
    source = "from jaxmoe import registry\n\n\n@registry.COLOURS.register('green')\ndef green():\n    return 3\n"
    install({"green": "paint_parts:green"}, source=source)
    sys.modules.pop("paint_parts", None)
    assert colours["green"]() == 3
    assert list(colours) == ["red", "blue", "green"]
    colours.remove("green")
    colours.register("green", 4)  # another one of that name
    with pytest.raises(PartError, match="'green' of package paint has the name of one that is there already"):
        list(colours)


def test_two_packages_have_no_name_in_common(colours, install):
    install({"green": "paint_parts:green"})
    install({"green": "dye_parts:green"}, package="dye")
    with pytest.raises(PartError, match=r"colour 'green' is named by package (dye|paint) and package (dye|paint)"):
        list(colours)


@pytest.mark.parametrize(
    ("interface", "told"), [(2, "is written for interface 2, and this jaxmoe knows 1"), ("1", "states interface '1'")]
)
def test_parts_of_newer_interfaces_are_refused(colours, interface, told):
    colours.register("old", SimpleNamespace(interface=1))
    with pytest.raises(PartError, match=told):
        colours.register("new", SimpleNamespace(interface=interface))
    assert "new" not in colours


OPEN = [each for each in vars(registry).values() if isinstance(each, Registry)]


@pytest.mark.parametrize("parts", OPEN, ids=lambda each: each.kind)
def test_every_part_of_the_package_can_be_had(parts):
    assert len(parts) == len({*parts}) > 0
    for name in parts.names:
        assert parts[name] is not None


def test_names_are_listed_without_jax():
    script = (
        "import sys; from jaxmoe import registry\n"
        "names = [list(each) for each in vars(registry).values() if isinstance(each, registry.Registry)]\n"
        "assert len(names) > 5 and not {'jax', 'numpy'} & {*sys.modules}"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
