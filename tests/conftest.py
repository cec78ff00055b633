"""A skip is a failure where CI says so: what a machine cannot run, it must not pass."""

import os
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.system.oracle import GENERATIONS, Oracle, asking


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, and CI=true makes that a failure: {report.longrepr}"
    return report


@pytest.fixture(scope="module", params=GENERATIONS)
def oracle(request: pytest.FixtureRequest) -> Iterator[Oracle]:
    """A real libvirt, each generation in turn."""
    with asking(request.param) as it:
        yield it


@pytest.fixture(scope="module")
def oracles() -> Iterator[Sequence[Oracle]]:
    """All generations at once."""
    with ExitStack() as stack:
        yield [stack.enter_context(asking(generation)) for generation in GENERATIONS]


@pytest.fixture
def hooks() -> Iterator[Path]:
    """A folder for sockets with a path short enough for one."""
    with tempfile.TemporaryDirectory(prefix="hooks-") as folder:
        yield Path(folder)
