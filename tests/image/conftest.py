"""The image, built once for all of its tests."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.image.cage import IMAGE, MINIMAL


@pytest.fixture(scope="session", autouse=True)
def image() -> None:
    """Build both, on a base of our own where no registry of images is reached."""
    script = Path(__file__).with_name("build.sh")
    for arguments in ([IMAGE], [MINIMAL, "minimal"]):
        subprocess.run([script, *arguments], env={**os.environ, "BASE": os.environ.get("BASE", "local")}, check=True)
