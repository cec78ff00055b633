"""Addresses and CPU lists: what is read, what is refused, and that printing gives the text back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hook.address import CpuLists, CpuSet, PciAddress, format_cpu_list, parse_cpu_list

ADDRESSES = st.builds(
    PciAddress, st.integers(0, 0xFFFF_FFFF), st.integers(0, 0xFF), st.integers(0, 0x1F), st.integers(0, 7)
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("0000:3b:00.0", PciAddress(0, 0x3B, 0, 0), id="as the kernel prints it"),
        pytest.param("ABCD:FF:1F.7", PciAddress(0xABCD, 0xFF, 0x1F, 7), id="the largest, in upper case"),
        pytest.param("10000:e1:00.0", PciAddress(0x10000, 0xE1, 0, 0), id="a domain of five digits"),
    ],
)
def test_an_address_is_read(text: str, expected: PciAddress) -> None:
    assert expected == PciAddress.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param("3b:00.0", id="no domain"),
        pytest.param("000:3b:00.0", id="a domain of three digits"),
        pytest.param("123456789:3b:00.0", id="a domain of nine digits"),
        pytest.param("0000:3b:00.8", id="a function above 7"),
        pytest.param("0000:3b:20.0", id="a slot above 0x1f"),
        pytest.param("0000:3b:00.0\n", id="a newline at the end"),
        pytest.param(" 0000:3b:00.0", id="a space in front"),
        pytest.param("0000:3b:00.0/..", id="a path"),
        pytest.param("0000:\u0663b:00.0", id="a digit of another script"),
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a PCI address like|PCI slot 0x20 is outside 0..0x1f"):
        PciAddress.parse(text)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((1 << 32, 0, 0, 0), "PCI domain 0x100000000 is outside 0..0xffffffff"),
        ((0, 256, 0, 0), "PCI bus 0x100 is outside 0..0xff"),
        ((0, 0, -1, 0), "PCI slot -0x1 is outside 0..0x1f"),
        ((0, 0, 0, 8), "PCI function 0x8 is outside 0..0x7"),
    ],
    ids=["domain", "bus", "slot", "function"],
)
def test_a_number_out_of_range_is_refused(numbers: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        PciAddress(*numbers)

    assert message == str(refusal.value)


@given(ADDRESSES)
def test_every_address_is_read_back_from_its_text(address: PciAddress) -> None:
    assert address == PciAddress.parse(str(address))


def test_addresses_are_sorted_by_number_and_not_by_text() -> None:
    texts = ["10000:00:00.0", "0000:ff:00.0", "0000:02:10.0", "0000:02:02.1", "0000:02:02.0"]

    assert list(reversed(texts)) == [str(address) for address in sorted(map(PciAddress.parse, texts))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("", set(), id="nothing"),
        pytest.param(" \n", set(), id="white space"),
        pytest.param("5", {5}, id="one CPU"),
        pytest.param("0-3,8", {0, 1, 2, 3, 8}, id="a range and a CPU"),
        pytest.param("0, 2 ", {0, 2}, id="spaces around the parts"),
        pytest.param("3,1,2,1-2", {1, 2, 3}, id="in any order, some twice"),
        pytest.param("0-5,^2-3,^9", {0, 1, 4, 5}, id="without some, one of them not there"),
        pytest.param("^1,0-2", {0, 2}, id="what is taken away stands first"),
        pytest.param("8191", {8191}, id="the highest CPU"),
    ],
)
def test_a_cpu_list_is_read(text: str, expected: set[int]) -> None:
    assert expected == parse_cpu_list(text)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("a", id="a letter"),
        pytest.param("1-", id="half a range"),
        pytest.param("3-1", id="a range that runs backward"),
        pytest.param("1,,2", id="an empty part"),
        pytest.param("0-8192", id="a CPU above the highest"),
        pytest.param("0-9999999", id="far above the highest"),
        pytest.param("-1", id="a negative number"),
        pytest.param("0-6:1/2", id="a stride"),
        pytest.param("\u0661", id="a digit of another script"),
    ],
)
def test_what_is_no_cpu_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a CPU list"):
        parse_cpu_list(text)


def test_the_error_does_not_repeat_a_long_list() -> None:
    with pytest.raises(ValueError) as refusal:
        parse_cpu_list("x" * 10_000)

    assert f"'{'x' * 80}' is not a CPU list like 0-3,8" == str(refusal.value)

    long = "0," * 40 + "3-1"
    with pytest.raises(ValueError) as refusal:
        parse_cpu_list(long)

    assert f"'{'0,' * 40}' is not a CPU list: bad range '3-1'" == str(refusal.value)


@pytest.mark.parametrize(
    ("cpus", "expected"),
    [(set(), ""), ({7}, "7"), ({0, 1}, "0-1"), ({8, 0, 2, 1}, "0-2,8"), ({1, 3, 5}, "1,3,5")],
    ids=["none", "one", "a range", "a range and one", "no range"],
)
def test_a_cpu_list_is_printed_as_the_kernel_does(cpus: set[int], expected: str) -> None:
    assert expected == format_cpu_list(frozenset(cpus))


@given(st.frozensets(st.integers(0, 300)))
def test_every_cpu_set_is_read_back_from_its_text(cpus: CpuSet) -> None:
    assert cpus == parse_cpu_list(format_cpu_list(cpus))


def test_equal_lists_share_a_set() -> None:
    lists = CpuLists()

    assert lists.parse("0-3") is lists.parse("0-3")
    assert lists.parse("0-2,3") == lists.parse("0-3")


def test_all_lists_together_are_bounded() -> None:
    """Eight lists of 8,192 CPUs and one more are read, and of more only those that were there."""
    lists = CpuLists()
    read = [lists.parse(f"0-8191,{number}") for number in range(9)]

    assert {len(cpus) for cpus in read} == {8192}
    with pytest.raises(ValueError, match=r"^'7' comes after lists of more than 65536 CPUs$"):
        lists.parse("7")
    with pytest.raises(ValueError, match=f"^'{'7,' * 40}' comes after lists of more than 65536 CPUs$"):
        lists.parse("7," * 41)
    assert lists.parse("0-8191,5") is read[5]


def test_a_list_that_makes_no_sense_does_not_count() -> None:
    with pytest.raises(ValueError, match="is not a CPU list"):
        CpuLists().parse("3-1")
