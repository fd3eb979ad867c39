"""A command that refuses its input: exit code 2 and one message, without a traceback."""

from pathlib import Path

from typer.testing import Result


def told(result: Result, *expected: str) -> None:
    """Its one message has these texts."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("error:") == 1
    for text in expected:
        assert text in result.stderr


def refused(result: Result, out: Path, *expected: str) -> None:
    """Its one message has these texts, and it has written nothing, not even the folder above `out`."""
    told(result, *expected)
    assert not out.parent.exists()


def refused_in_a_line(result: Result, out: Path, *expected: str) -> None:
    """As `refused`, and its message is one line."""
    refused(result, out, *expected)
    assert result.stderr.count("\n") == 1
