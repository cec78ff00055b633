"""Compares text with a file below tests/goldens; must not decide what is right.

REGENERATE=1 rewrites the files. A golden that is not there yet is written, and the test fails.
"""

import os
from collections.abc import Iterable
from pathlib import Path

GOLDENS = Path(__file__).parent / "goldens"


def is_regenerating() -> bool:
    """True when files are to be rewritten."""
    return os.environ.get("REGENERATE") == "1"


def check(name: str, actual: str) -> None:
    """Assert that the golden `name` has this text."""
    path = GOLDENS / name
    is_new = not path.exists()
    if is_new or is_regenerating():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(actual)
    assert not is_new, f"wrote the new golden {name}: read it, then run again"

    assert path.read_text() == actual


def check_names(folder: str, expected: Iterable[str]) -> None:
    """Assert that a folder holds these goldens and no other, so that none outlives its test."""
    assert sorted(expected) == sorted(path.name for path in (GOLDENS / folder).iterdir())
