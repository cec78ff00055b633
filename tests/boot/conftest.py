"""The libvirts that boots ask for their command lines; must not start one that no test asks for."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.boot.boot import why_not
from tests.system.oracle import Generation, Oracle

Ask = Callable[[Generation], Oracle]


@pytest.fixture(scope="session")
def ask() -> Iterator[Ask]:
    """The libvirt of a generation, started when it is first asked for."""
    with ExitStack() as stack:
        started: dict[Generation, Oracle] = {}

        def oracle(generation: Generation) -> Oracle:
            reason = why_not(generation)
            if reason is not None:
                pytest.skip(reason)
            if generation not in started:
                started[generation] = stack.enter_context(Oracle(generation))
            return started[generation]

        yield oracle
