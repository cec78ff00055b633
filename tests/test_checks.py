"""Lint, types and layers are tests too, so that one command says everything."""

import subprocess
import sys
from pathlib import Path

import pytest

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
