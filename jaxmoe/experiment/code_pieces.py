"""The pieces of code that a process ran through, by digest: functions, and the constants and classes that they name.

`watch` notes every function that runs from then on, `digests_of_what_ran` has their digests, and `digests` those of all
pieces of some files. A comment, a docstring, an import or the place of a piece does not count, and code that did not
run does not either. Where functions were not watched, as their seconds count, all that was loaded counts.

A plain function counts where it ran. What cannot be seen to run counts where a piece that counts names it: constants,
bodies of classes (fields by their values, not by their types), and decorated functions, which may have been compiled
before and kept on disk.
"""

import ast
import atexit
import hashlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.ClassDef, *FUNCTIONS)
DIGITS = 6  # of a digest
_RAN: dict[int, CodeType] = {}  # by identity: to compare code objects takes long
_WATCHED: bool | None = None  # from the first case on; never again after a case that was not


@dataclass(frozen=True)
class Piece:
    """A statement of a module, a method, or a class without its methods, in whose lines they are."""

    binds: frozenset[str]
    lines: range
    digest: str
    names: frozenset[str]
    named: bool  # counts where it is named; otherwise where it ran


def watch() -> None:
    """Note functions that run from now on, in this thread and in those that are started.

    What is mostly Python takes half as long again.
    """
    global _WATCHED
    if _WATCHED is None:
        _WATCHED = True
        sys.settrace(_note)
        threading.settrace(_note)
        atexit.register(stop)  # what runs when the interpreter ends finds no names of this module


def stop() -> None:
    """Let functions run unseen. What ran then may be kept for later, so all that is loaded counts from now on."""
    global _WATCHED
    _WATCHED = False
    sys.settrace(None)
    threading.settrace(None)


def _note(frame: FrameType, event: str, argument: Any) -> None:
    _RAN.setdefault(id(frame.f_code), frame.f_code)


def digests_of_what_ran(folders: Iterable[Path]) -> dict[Path, set[str]]:
    """Digests of the pieces that this process ran through, by file, of files that it loaded from these folders."""
    inside = tuple(f"{folder}{os.sep}" for folder in folders)
    loaded = {getattr(module, "__file__", None) or "" for module in [*sys.modules.values()]}
    pieces = {file: _pieces_as_loaded(file) for file in loaded if file.startswith(inside) and file.endswith(".py")}
    every = [piece for each in pieces.values() for piece in each]
    counted = _with_what_they_name(_seen(pieces), every) if _WATCHED else {*every}
    found = {Path(file): {piece.digest for piece in each if piece in counted} for file, each in pieces.items()}
    return {file: each for file, each in found.items() if each}


def _seen(pieces: Mapping[str, Sequence[Piece]]) -> set[Piece]:
    """Pieces of which a function ran."""
    lines: dict[str, set[int]] = {file: set() for file in pieces}
    for code in [*_RAN.values()]:
        if code.co_filename in lines and code.co_flags & CO_OPTIMIZED:  # of a function, not of a module or class
            lines[code.co_filename].add(code.co_firstlineno)
    return {piece for file, each in pieces.items() for piece in each if lines[file].intersection(piece.lines)}


def digests(files: Iterable[Path]) -> set[str]:
    """Digests of all pieces of these files as they are now."""
    return {piece.digest for file in files for piece in _pieces(file.read_text())}


def _with_what_they_name(counted: set[Piece], pieces: list[Piece]) -> set[Piece]:
    binding: dict[str, list[Piece]] = {}
    for piece in pieces:
        for name in piece.binds if piece.named else ():
            binding.setdefault(name, []).append(piece)
    found, open_ = set(counted), list(counted)
    while open_:
        for name in open_.pop().names & binding.keys():
            new = [piece for piece in binding[name] if piece not in found]
            found.update(new)
            open_ += new
    return found


@cache
def _pieces_as_loaded(file: str) -> tuple[Piece, ...]:
    """Pieces of a file as it was when this was asked first: one that changes later is not what runs."""
    return _pieces(Path(file).read_text())


@lru_cache(maxsize=4096)
def _pieces(text: str) -> tuple[Piece, ...]:
    return tuple(piece for node in ast.parse(text).body for piece in _of_statement(node))


def _of_statement(node: ast.stmt) -> Iterator[Piece]:
    if isinstance(node, ast.Import | ast.ImportFrom) or _is_text(node):
        return
    if isinstance(node, ast.ClassDef):
        methods = [each for each in node.body if isinstance(each, FUNCTIONS)]
        node.body = [each for each in node.body if each not in methods] or [ast.Pass()]
        yield _piece(node, {node.name}, named=True)
        yield from (_piece(method, {method.name}, named=False) for method in methods)
    elif isinstance(node, FUNCTIONS):
        yield _piece(node, {node.name}, named=bool(node.decorator_list))
    else:
        yield _piece(node, {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}, named=True)


def _piece(node: ast.stmt, binds: Iterable[str], named: bool) -> Piece:
    decorators = getattr(node, "decorator_list", [])
    lines = range(min(each.lineno for each in (node, *decorators)), (node.end_lineno or node.lineno) + 1)
    for each in ast.walk(node):
        if isinstance(each, DOCUMENTED):
            each.body = [line for line in each.body if not _is_text(line)] or [ast.Pass()]
    digest = hashlib.sha256(ast.unparse(node).encode()).hexdigest()[:DIGITS]
    return Piece(frozenset(binds), lines, digest, frozenset(_names(node)), named)


def _names(node: ast.stmt) -> Iterator[str]:
    """Names that a piece has in it, but for types of a class's fields."""
    typed = (
        [each.annotation for each in node.body if isinstance(each, ast.AnnAssign)]
        if isinstance(node, ast.ClassDef)
        else []
    )
    left = {id(name) for each in typed for name in ast.walk(each)}
    for each in ast.walk(node):
        if id(each) not in left and isinstance(each, ast.Name | ast.Attribute):
            yield each.id if isinstance(each, ast.Name) else each.attr


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
