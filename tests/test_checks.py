"""Lint, types and layers are tests too, so that one command says everything."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.mutants import REASONS

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent

COMMANDS = {
    "format": ["ruff", "format", "--check", "."],
    "lint": ["ruff", "check", "."],
    "types": ["mypy"],
    "layers": ["lint-imports"],
}


@pytest.mark.parametrize("check", COMMANDS)
def test_check_is_clean(check: str) -> None:
    command, *arguments = COMMANDS[check]
    done = subprocess.run([BIN / command, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


def test_the_core_is_one_list() -> None:
    """What must be pure is what is mutated, and what coverage must reach in full (Makefile)."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    (pure,) = (c for c in tools["importlinter"]["contracts"] if c["name"] == "the core is pure")

    assert sorted(tools["mutmut"]["only_mutate"]) == sorted(
        name.replace(".", "/") + ".py" for name in pure["source_modules"]
    )


@pytest.mark.parametrize("name", REASONS)
def test_what_has_a_reason_to_live_as_a_mutant_is_there(name: str) -> None:
    """mutmut calls a function x_NAME and a method xǁCLASSǁNAME."""
    module, _, mangled = name.partition(".")
    found: object = importlib.import_module(f"hook.{module}")
    for part in mangled.split("ǁ")[1:] if "ǁ" in mangled else [mangled.removeprefix("x_")]:
        found = getattr(found, part)

    assert callable(found)
