"""Judge the oracle's own manners: shared folders, hangs, crashes; must not test libvirt."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.oracle import (
    GENERATIONS,
    Oracle,
    OracleError,
    OracleRefused,
    _copy_capabilities,
    asking,
)

XML = b"<domain type='qemu'><name>a</name><memory>1024</memory><os><type>hvm</type></os></domain>"


@pytest.fixture(params=GENERATIONS)
def oracle(request: pytest.FixtureRequest) -> Iterator[Oracle]:
    with asking(request.param) as it:
        yield it


def child_of(oracle: Oracle) -> int:
    assert oracle._child is not None
    return oracle._child.pid


def test_it_says_which_libvirt_answers(oracle: Oracle) -> None:
    libvirt = {"debian12": "libvirt 9.0.0, QEMU 7.2.", "debian13": "libvirt 11.3.0, QEMU 10.0."}

    assert oracle.version().startswith(libvirt[oracle.generation])


def test_two_at_a_time_do_not_meet(oracle: Oracle) -> None:
    with Oracle(oracle.generation) as other:
        assert other._root != oracle._root
        assert other.define(XML) != b""
        assert oracle.define(XML) != b""


def test_what_one_learned_of_qemu_is_copied_unless_older(tmp_path: Path) -> None:
    learned, own = (tmp_path / number / "cache/qemu/capabilities" for number in "01")
    for folder, texts in ((learned, "abc"), (own, "xy")):
        folder.mkdir(parents=True)
        for name, text in zip("123", texts, strict=False):
            (folder / f"{name}.xml").write_text(text)
    os.utime(learned / "1.xml", (0, 0))
    os.utime(own / "2.xml", (0, 0))

    _copy_capabilities(tmp_path / "0", tmp_path / "1")

    assert {file.stem: file.read_text() for file in own.iterdir()} == {"1": "x", "2": "b", "3": "c"}


def test_a_domain_does_not_outlive_its_question(oracle: Oracle) -> None:
    for uuid in (b"<uuid>00000000-0000-0000-0000-00000000000%d</uuid>" % i for i in (1, 2)):
        assert uuid in oracle.define(XML.replace(b"<memory>", uuid + b"<memory>"))


def test_nonsense_is_refused_and_the_oracle_lives(oracle: Oracle) -> None:
    with pytest.raises(OracleRefused):
        oracle.define(b"<domain")
    with pytest.raises(OracleRefused, match="not well-formed"):
        oracle.argv(b"<domain")

    assert oracle.define(XML)


def test_a_hang_ends_the_child_and_tells_the_question(oracle: Oracle) -> None:
    child = child_of(oracle)
    # Stopped, it takes the question and gives no answer.
    os.kill(child, signal.SIGSTOP)

    with pytest.raises(OracleError, match=r"define: <domain type='qemu'>.*no answer in 0\.2 s"):
        oracle._ask({"op": "define", "xml": XML.decode()}, 0.2)

    assert not Path(f"/proc/{child}").exists()
    with pytest.raises(OracleError, match="not running"):
        oracle.version()


def test_a_child_that_ends_is_told_from_a_refusal(oracle: Oracle) -> None:
    os.kill(child_of(oracle), signal.SIGKILL)

    with pytest.raises(OracleError, match="the oracle ended"):
        oracle.version()


def test_leaving_it_ends_the_child(oracle: Oracle) -> None:
    with Oracle(oracle.generation) as other:
        child = child_of(other)

    assert not Path(f"/proc/{child}").exists()
