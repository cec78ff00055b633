"""Reading a tree: a directory reads like its recording, nothing outside is opened, nonsense is reported."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hook.address import PciAddress, parse_cpu_list
from hook.errors import SysfsError
from hook.host import HostTopology, NumaNode, PciFunction, PciRegion
from hook.recording import parse_recording
from hook.sysfs import (
    ATTRIBUTE_LIMIT_BYTES,
    NODES,
    PCI_DEVICES,
    DirectoryTree,
    MemoryTree,
    SysfsTree,
    all_functions,
    read_host,
)
from tests.build import host, unpack
from tests.scenario import HOST_NAMES, HOSTS, NAMES, Scenario

GPU = PciAddress.parse("0000:41:00.0")
PORT = PciAddress.parse("0000:40:01.0")
GPU_PATH = f"pci0000:40/{PORT}/{GPU}"
UUID = "4b20d080-1b54-4048-85b3-a6a62d165c01"


def mediated_devices(tree: SysfsTree) -> tuple[str, ...]:
    return tree.names("bus/mdev/devices")


def read_all(tree: SysfsTree) -> HostTopology:
    return read_host(tree, all_functions(tree), mediated_devices(tree))


RECORDINGS = {
    path.stem: path for path in (*(HOSTS / f"{n}.sysfs" for n in HOST_NAMES), *(Scenario(n).sysfs_path for n in NAMES))
}


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_directory_reads_like_its_recording(name: str, tmp_path: Path) -> None:
    tree = parse_recording(RECORDINGS[name].read_text())
    directory = DirectoryTree(str(unpack(tree, tmp_path)))
    expected = read_all(tree)

    assert all_functions(tree) == all_functions(directory)
    assert expected == read_all(directory)
    assert expected.functions or "no-hostdev" in name


def test_every_attribute_is_read() -> None:
    attributes = {
        "vendor": "0x10de",
        "device": "0x2335",
        "subsystem_vendor": "0x10de",
        "subsystem_device": "0x18be",
        "class": "0x030200",
        "numa_node": "1",
        "local_cpulist": "4-7",
        "resource": "0x00000000a0000000 0x00000000a0ffffff 0x0000000000040200\\n"
        "0x0000000000000000 0x0000000000000000 0x0000000000000000\\n"
        "0x0000010000000000 0x000001ffffffffff 0x000000000014220c\\n"
        "0x0000000000000000 0x0000000000000000 0x0000000000000000\\n"
        "0x000000000000e000 0x000000000000e07f 0x0000000000040101\\n"
        "0x0000000000000000 0x0000000000000000 0x0000000000000000\\n"
        "0x00000000b0000000 0x00000000b00fffff 0x0000000000046200",
        "physfn": str(PORT),
        "max_link_speed": "32.0 GT/s PCIe",
        "max_link_width": "16",
    }
    tree = parse_recording(
        host(
            {f"pci0000:40/{PORT}": {"numa_node": -1, "class": "0x060400"}, GPU_PATH: attributes},
            distances={0: "10 21", 1: "21 10"},
            extra=f"bus/mdev/devices/{UUID} -> ../../../devices/{GPU_PATH}/{UUID}\n"
            f"devices/{GPU_PATH}/iommu_group -> ../../../../kernel/iommu_groups/27\n",
        )
    )

    assert read_host(tree, [], [UUID]) == HostTopology(
        functions={
            GPU: PciFunction(
                address=GPU,
                root="devices/pci0000:40",
                above=(PORT,),
                bridges=(PORT,),
                vendor=0x10DE,
                device=0x2335,
                subsystem_vendor=0x10DE,
                subsystem_device=0x18BE,
                class_code=0x030200,
                numa_node=1,
                local_cpus=parse_cpu_list("4-7"),
                physical_function=PORT,
                regions=(
                    PciRegion(0x100_0000, False, False),
                    PciRegion(1 << 40, False, True),
                    PciRegion(0x80, True, False),
                ),
                rom_bytes=1 << 20,
                max_speed_mts=32000,
                max_width=16,
                iommu_group=27,
            ),
            PORT: PciFunction(address=PORT, root="devices/pci0000:40", above=(), bridges=(), class_code=0x060400),
        },
        mediated_devices={UUID: GPU},
        nodes={
            0: NumaNode(id=0, cpus=parse_cpu_list("0-3"), distances={0: 10, 1: 21}),
            1: NumaNode(id=1, cpus=parse_cpu_list("4-7"), distances={0: 21, 1: 10}),
        },
    )


def test_only_what_is_wanted_and_what_is_above_is_read() -> None:
    tree = parse_recording(host({GPU_PATH: 0, f"pci0000:40/{PORT}": 0, "pci0000:c0/0000:c0:01.0/0000:c1:00.0": 1}))

    assert sorted(read_host(tree, [GPU], []).functions) == [PORT, GPU]


@pytest.mark.parametrize(
    "uuid",
    [
        pytest.param("4b20d080-1b54-4048-85b3-a6a62d165c02", id="an mdev that is not there"),
        pytest.param("4b20d080-1b54-4048-85b3-a6a62d165c03", id="an mdev whose parent is no PCI function"),
    ],
)
def test_what_sysfs_does_not_know_is_left_out(uuid: str) -> None:
    extra = "bus/mdev/devices/4b20d080-1b54-4048-85b3-a6a62d165c03 -> ../../../devices/virtual/mtty/mtty/x\n"
    tree = parse_recording(host({GPU_PATH: 0}, extra=extra))
    found = read_host(tree, [PciAddress.parse("0000:99:00.0")], [uuid])

    assert (found.functions, found.mediated_devices, found.problems) == ({}, {}, ())


def test_a_root_bus_inside_the_tree_of_another_one() -> None:
    vmd, port, nvme = (PciAddress.parse(a) for a in ("0000:00:0e.0", "10000:e0:02.0", "10000:e1:00.0"))
    tree = parse_recording(host({f"pci0000:00/{vmd}/pci10000:e0/{port}/{nvme}": 0}))
    function = read_host(tree, [nvme], []).functions[nvme]

    assert (function.root, function.above, function.bridges) == (
        f"devices/pci0000:00/{vmd}/pci10000:e0",
        (vmd, port),
        (port,),
    )


def test_a_root_bus_of_a_platform_device() -> None:
    tree = parse_recording(host({f"platform/40000000.pcie/pci0000:00/0000:00:01.0/{GPU}": 0}))
    function = read_host(tree, [GPU], []).functions[GPU]

    assert function.root == "devices/platform/40000000.pcie/pci0000:00"


def test_a_function_without_a_root_bus_has_none() -> None:
    function = read_host(parse_recording(host({f"elsewhere/{GPU}": 0})), [GPU], []).functions[GPU]

    assert (function.root, function.above, function.bridges) == ("", (), ())


def test_physical_functions_in_a_circle_end() -> None:
    other = PciAddress.parse("0000:41:00.1")
    paths = {GPU_PATH: {"physfn": str(other)}, f"{GPU_PATH[:-1]}1": {"physfn": str(GPU)}}

    assert sorted(read_host(parse_recording(host(paths)), [GPU], []).functions) == [GPU, other]


@pytest.mark.parametrize(
    ("attribute", "value", "problem"),
    [
        ("numa_node", "none", "cannot read {}: 'none' is not a number"),
        ("class", "", "cannot read {}: '' is not a number"),
        ("vendor", "x" * 100, "cannot read {}: '" + "x" * 40 + "' is not a number"),
        ("local_cpulist", "0-", "cannot read {}: '0-' is not a CPU list like 0-3,8"),
        ("resource", "0x0 0x1", "cannot read {}: '0x0 0x1' is not 'start end flags'"),
        ("resource", "a b g", "cannot read {}: 'a b g' is not 'start end flags'"),
        ("resource", f"0x0 0x{'f' * 5000} 0x0", "cannot read {}: '0x0 0x" + "f" * 54 + "' is not 'start end flags'"),
        ("device", "\\\\xff", "cannot read {}: '\\\\xff' is not a number"),
        ("max_link_speed", "fast", "cannot read {}: 'fast' is not a speed like '8.0 GT/s PCIe'"),
        ("max_link_width", "x16", "cannot read {}: 'x16' is not a number"),
    ],
)
def test_an_attribute_without_sense_is_a_problem_and_absent(attribute: str, value: str, problem: str) -> None:
    path = f"devices/{GPU_PATH}/{attribute}"
    without = read_host(parse_recording(host({GPU_PATH: {"class": "0x030200"}})), [GPU], [])
    found = read_host(parse_recording(host({GPU_PATH: {attribute: value}})), [GPU], [])

    assert found.problems == (problem.format(path),)
    if attribute != "class":
        assert found.functions == without.functions


@pytest.mark.parametrize(
    ("speed", "mts"),
    [
        ("2.5 GT/s", 2500),  # before Linux 5.7
        ("8 GT/s", 8000),
        ("64.0 GT/s PCIe", 64000),
        ("Unknown", None),
        ("Unknown speed", None),
        ("0 GT/s", None),
    ],
)
def test_speeds_of_old_and_new_kernels(speed: str, mts: int | None) -> None:
    found = read_host(parse_recording(host({GPU_PATH: {"max_link_speed": speed}})), [GPU], [])

    assert (found.functions[GPU].max_speed_mts, found.problems) == (mts, ())


@pytest.mark.parametrize(("width", "lanes"), [("1", 1), ("32", 32), ("0", None), ("255", None)])
def test_widths_that_stand_for_none(width: str, lanes: int | None) -> None:
    found = read_host(parse_recording(host({GPU_PATH: {"max_link_width": width}})), [GPU], [])

    assert (found.functions[GPU].max_width, found.problems) == (lanes, ())


@pytest.mark.parametrize("value", ["-1", "-2"])
def test_a_negative_numa_node_is_no_node_and_no_problem(value: str) -> None:
    found = read_host(parse_recording(host({GPU_PATH: value})), [GPU], [])

    assert (found.functions[GPU].numa_node, found.problems) == (None, ())


@pytest.mark.parametrize(
    ("row", "expected", "problems"),
    [
        pytest.param("10 21", {0: 10, 2: 21}, 0, id="a number for each node"),
        pytest.param("10 21 31", {}, 1, id="too many numbers"),
        pytest.param("10", {}, 1, id="too few numbers"),
        pytest.param("10 far", {}, 1, id="a word"),
        pytest.param("10 -1", {}, 1, id="a negative number"),
        pytest.param("10 " + "9" * 5000, {}, 1, id="a number of 5000 digits"),
        pytest.param("", {}, 0, id="nothing"),
    ],
)
def test_distances(row: str, expected: dict[int, int], problems: int) -> None:
    """Numbers belong to the online nodes in their order, here 0 and 2."""
    found = read_host(parse_recording(host({}, nodes={0: "0", 2: "1"}, distances={0: row, 2: "21 10"})), [], [])

    assert found.nodes[0].distances == expected
    assert len(found.problems) == problems


def test_what_is_no_node_among_the_nodes_is_passed_over() -> None:
    names = ("node1", "nodeX", "node", "online", "node\u0661", "node" + "1" * 5000)
    tree = MemoryTree({f"devices/system/node/{name}/cpulist": b"0-3\n" for name in names}, {})

    assert list(read_host(tree, [], []).nodes) == [1]


def test_a_node_of_memory_only_has_no_cpus() -> None:
    found = read_host(parse_recording(host({}, nodes={0: "0-3", 1: ""})), [], [])

    assert found.nodes[1] == NumaNode(id=1, cpus=frozenset(), distances={})


# Trees in memory.


MEMORY = MemoryTree(
    {"a/b/file": b"x" * (ATTRIBUTE_LIMIT_BYTES + 1), "a/other": b"1"},
    {
        "up": "a/b/../other",
        "chain": "./up",
        "folder": "a/b",
        "out": "../../etc/passwd",
        "absolute": "/etc/passwd",
        "circle": "circle",
        "one": "two",
        "two": "one",
        "gone": "a/gone",
    },
)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a/other", "a/other"),
        ("a//./other", "a/other"),
        ("up", "a/other"),
        ("chain", "a/other"),
        ("folder/file", "a/b/file"),
        ("folder/../other", "a/other"),
        ("a/missing", None),
        ("../a/other", None),
        ("out", None),
        ("absolute", None),
        ("circle", None),
        ("one", None),
        ("gone", "a/gone"),  # a link is taken at its word
    ],
)
def test_resolving_in_memory(path: str, expected: str | None) -> None:
    assert expected == MEMORY.resolve(path)


def test_reading_in_memory() -> None:
    assert MEMORY.read("folder/file") == b"x" * ATTRIBUTE_LIMIT_BYTES
    assert MEMORY.read("a") is None
    assert MEMORY.read("out") is None
    assert MEMORY.names("folder") == ("file",)
    assert MEMORY.names("a") == ("b", "other")
    assert MEMORY.names("a/other") == MEMORY.names("circle") == MEMORY.names("nothing") == ()
    assert MEMORY.names("")[:3] == ("a", "absolute", "chain")


# Directories.


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return unpack(parse_recording(host({GPU_PATH: 0})), tmp_path / "sys")


@pytest.fixture
def alarm() -> Iterator[None]:
    """Ends a test that hangs."""

    def ring(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_nothing_outside_the_directory_is_opened(directory: Path) -> None:
    (directory.parent / "secret").write_text("1")
    inside = directory / "devices" / GPU_PATH
    for name, target in {"relative": "../../../../../secret", "absolute": str(directory.parent / "secret")}.items():
        (inside / name).symlink_to(target)
        assert (inside / name).read_text() == "1"
    (inside / "outside").symlink_to(directory.parent)
    (directory.parent / "sys-too").mkdir()
    (directory.parent / "sys-too" / "secret").write_text("1")
    tree = DirectoryTree(str(directory))

    paths = ["relative", "absolute", "outside/secret", "outside/sys-too/secret", "../../../../../secret"]
    assert [tree.read(f"devices/{GPU_PATH}/{path}") for path in paths] == [None] * 5
    assert [tree.resolve(f"devices/{GPU_PATH}/{path}") for path in paths] == [None] * 5
    assert tree.names(f"devices/{GPU_PATH}/outside") == tree.names("..") == ()
    assert tree.read("../sys-too/secret") is None


def test_a_device_that_is_a_link_out_of_the_tree_is_unknown(directory: Path) -> None:
    link = directory / "bus/pci/devices/0000:42:00.0"
    link.symlink_to("/etc")

    assert list(read_host(DirectoryTree(str(directory)), [PciAddress.parse(link.name)], []).functions) == []


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("kind", ["pipe", "folder", "circle", "gone"])
def test_what_cannot_be_read_is_absent(directory: Path, kind: str) -> None:
    path = directory / "devices" / GPU_PATH / "numa_node"
    path.unlink()
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "circle":
            path.symlink_to("numa_node")
    tree = DirectoryTree(str(directory))

    assert tree.read(f"devices/{GPU_PATH}/numa_node") is None
    assert read_host(tree, [GPU], []).functions[GPU].numa_node is None
    assert tree.names(f"devices/{GPU_PATH}/numa_node") == ()


def test_a_long_attribute_is_cut(directory: Path) -> None:
    (directory / "devices" / GPU_PATH / "config").write_bytes(b"x" * (ATTRIBUTE_LIMIT_BYTES + 5))

    assert DirectoryTree(str(directory)).read(f"devices/{GPU_PATH}/config") == b"x" * ATTRIBUTE_LIMIT_BYTES


def test_a_link_to_a_tree_is_a_tree(directory: Path) -> None:
    (directory.parent / "link").symlink_to(directory)

    assert DirectoryTree(str(directory.parent / "link")).read(f"devices/{GPU_PATH}/numa_node") == b"0\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "cannot read sysfs at {}: there is no such directory"),
        ("file", "cannot read sysfs at {}: there is no such directory"),
        (
            "empty",
            "cannot read sysfs at {}: it holds neither bus/pci/devices nor devices/system/node, expected a tree like /sys",
        ),
    ],
)
def test_what_is_no_tree_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    path = str(tmp_path / name)

    with pytest.raises(SysfsError) as refusal:
        DirectoryTree(path)

    assert message.format(path) == str(refusal.value)


def test_the_live_sysfs_makes_sense() -> None:
    """A container may show no nodes and no PCI bus; what it shows must be understood."""
    has_tree = any(os.path.isdir(f"/sys/{folder}") for folder in (PCI_DEVICES, NODES))

    assert not has_tree or read_all(DirectoryTree("/sys")).problems == ()
