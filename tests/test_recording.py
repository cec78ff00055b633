"""Archives and text recordings: every form reads the same, and a hostile one is a clear refusal."""

import gzip
import io
import os
import random
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hook import __version__, domain
from hook.errors import SysfsError
from hook.host import HostTopology
from hook.recording import format_recording, open_sysfs, parse_recording, record
from hook.sysfs import DirectoryTree, MemoryTree, SysfsTree, all_functions, all_mediated_devices, read_host
from tests.build import host, unpack
from tests.golden import check
from tests.scenario import HOST_NAMES, HOSTS, NAMES, Scenario

TEXT = host({"pci0000:40/0000:40:01.0/0000:41:00.0": 0}, distances={0: "10 21", 1: "21 10"})
TREE = parse_recording(TEXT)


def zipped(content: bytes) -> bytes:
    """The same bytes every time: without the time of day."""
    return gzip.compress(content, mtime=0)


GZIPPED = zipped(TEXT.encode())


def member(
    name: str, content: bytes = b"", *, kind: bytes = tarfile.REGTYPE, link: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = link
    info.size = len(content)
    return info, content


def tar(*members: tuple[tarfile.TarInfo, bytes], prefix: str = "", tree: MemoryTree = TREE) -> bytes:
    """An archive of a tree below prefix, and of further members."""
    files, links = tree.items()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, content in files.items():
            info, _ = member(prefix + path, content)
            archive.addfile(info, io.BytesIO(content))
        for path, target in links.items():
            archive.addfile(member(prefix + path, kind=tarfile.SYMTYPE, link=target)[0])
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def opened(tmp_path: Path, content: bytes) -> MemoryTree:
    path = tmp_path / "recording"
    path.write_bytes(content)
    tree = open_sysfs(str(path))
    assert isinstance(tree, MemoryTree)

    return tree


# The forms.


@pytest.mark.parametrize("prefix", ["", "./", "sys/", "./sys/", "dgx-a100/sys/", "a b/c/"])
@pytest.mark.parametrize("pack", [bytes, zipped], ids=["tar", "tar.gz"])
def test_an_archive_holds_the_tree_at_the_top_or_below_one_or_two_folders(
    tmp_path: Path, pack: Callable[[bytes], bytes], prefix: str
) -> None:
    content = pack(tar(prefix=prefix))

    assert opened(tmp_path, content).items() == TREE.items()


def test_a_text_recording_is_read(tmp_path: Path) -> None:
    assert opened(tmp_path, TEXT.encode()).items() == TREE.items()
    assert opened(tmp_path, GZIPPED).items() == TREE.items()


def test_a_directory_is_read(tmp_path: Path) -> None:
    assert isinstance(open_sysfs(str(unpack(TREE, tmp_path))), DirectoryTree)


def test_the_tree_nearest_to_the_top_counts(tmp_path: Path) -> None:
    other = member("other/sys/devices/system/node/node7/cpulist", b"0")

    assert opened(tmp_path, tar(other, prefix="sys/")).items() == TREE.items()


def test_of_two_trees_at_one_depth_the_first_name_counts(tmp_path: Path) -> None:
    other = member("b/devices/system/node/node7/cpulist", b"0")

    assert opened(tmp_path, tar(other, prefix="a/")).items() == TREE.items()


def test_a_hard_link_is_the_file_that_it_links_to(tmp_path: Path) -> None:
    more = member(
        "sys/devices/system/node/node2/cpulist", kind=tarfile.LNKTYPE, link="sys/devices/system/node/node0/cpulist"
    )
    gone = member("sys/devices/system/node/node3/cpulist", kind=tarfile.LNKTYPE, link="../nowhere")
    tree = opened(tmp_path, tar(more, gone, prefix="sys/"))

    assert tree.read("devices/system/node/node2/cpulist") == tree.read("devices/system/node/node0/cpulist") == b"0-3"
    assert tree.read("devices/system/node/node3/cpulist") == b""


# Text.


@pytest.mark.parametrize("name", HOST_NAMES)
def test_every_recorded_machine_is_read_back_from_its_text(name: str) -> None:
    tree = parse_recording((HOSTS / f"{name}.sysfs").read_text())
    again = parse_recording(format_recording(tree, comment="synthetic\n\nsecond line"))

    assert tree.items() == again.items()


def test_a_recording_is_sorted_and_has_its_comment_in_front() -> None:
    tree = MemoryTree(
        {"devices/system/node/node0/cpulist": b"0\n", "devices/a/resource": b"1 2\n3\\4\n", "devices/b": b""},
        {"devices/a0": "../x y"},
    )

    assert format_recording(tree, comment="what\n\nit is") == (
        "# what\n"
        "#\n"
        "# it is\n"
        "devices/a/resource = 1 2\\n3\\\\4\n"
        "devices/a0 -> ../x y\n"
        "devices/b = \n"
        "devices/system/node/node0/cpulist = 0\n"
    )


PATHS = st.lists(st.text("abz09.:_-", min_size=1, max_size=5), min_size=1, max_size=3).map("/".join)
VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=20)


@given(st.lists(VALUES, max_size=4).map("\n".join), st.lists(VALUES, max_size=4).map("\n".join))
def test_every_value_is_read_back_but_for_newlines_at_its_end(first: str, second: str) -> None:
    files = {"devices/system/node/node0/cpulist": first.encode(), "devices/x": second.encode()}
    again, links = parse_recording(format_recording(MemoryTree(files, {}))).items()

    assert again == {path: content.rstrip(b"\n") for path, content in files.items()}
    assert links == {}


@pytest.mark.parametrize(
    ("line", "number"),
    [
        pytest.param("devices/system/node/node0/cpulist", 2, id="no value"),
        pytest.param("= 1", 2, id="no path"),
        pytest.param("../up = 1", 2, id="a path that leads outside"),
        pytest.param("/etc/passwd = 1", 2, id="an absolute path"),
        pytest.param("a/../.. -> b", 2, id="a path that leads outside in the end"),
        pytest.param(". = 1", 2, id="the tree itself"),
        pytest.param("a=1", 2, id="no spaces"),
    ],
)
def test_a_bad_line_is_named_with_its_number(line: str, number: int) -> None:
    with pytest.raises(SysfsError) as refusal:
        parse_recording(f"# a comment\n{line}\n{TEXT}")

    assert str(refusal.value) == f"line {number} is {line!r}, expected 'path = value' or 'path -> target'"


def test_spaces_and_signs_inside_a_value_stay() -> None:
    tree = parse_recording("devices/system/node/node0/a =  x = y -> z \ndevices/b -> c = d\n\n  \n# e")

    assert tree.items() == ({"devices/system/node/node0/a": b" x = y -> z "}, {"devices/b": "c = d"})


# Recording.


def whole(tree: SysfsTree) -> HostTopology:
    return read_host(tree, all_functions(tree), all_mediated_devices(tree))


@pytest.mark.parametrize("name", HOST_NAMES)
def test_a_recording_of_a_machine_reads_as_the_machine(tmp_path: Path, name: str) -> None:
    machine = open_sysfs(str(HOSTS / f"{name}.sysfs"))
    assert isinstance(machine, MemoryTree)
    text = record(machine)

    assert whole(parse_recording(text)) == whole(machine)
    assert record(DirectoryTree(str(unpack(machine, tmp_path)))) == text
    assert record(parse_recording(text)) == text


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_for_one_vm_reads_as_its_host(name: str) -> None:
    scenario = Scenario(name)
    sources = [hostdev.source for hostdev in domain.parse(scenario.xml()).guest.hostdevs]
    functions = [source for source in sources if not isinstance(source, str)]
    mdevs = [source for source in sources if isinstance(source, str)]
    recorded = parse_recording(record(scenario.sysfs, sources))

    assert read_host(recorded, functions, mdevs) == read_host(scenario.sysfs, functions, mdevs)


def test_a_recording_of_this_machine_reads_as_this_machine() -> None:
    try:
        here = DirectoryTree("/sys")
    except SysfsError:
        pytest.skip("this machine shows neither a PCI bus nor NUMA nodes in /sys")

    assert whole(parse_recording(record(here))) == whole(here)


SECRETS = ("serial_number", "vpd", "config", "net/eth0/address", "nvme/nvme0/serial", "label", "unique_id")


def test_a_recording_has_what_is_read_and_nothing_else(tmp_path: Path) -> None:
    """A GPU, a VF with its PF, a mediated device; beside each attribute lies one that nobody shall see."""
    port = "devices/pci0000:40/0000:40:01.0"
    vf, pf, parent = f"{port}/0000:41:00.2", f"{port}/0000:41:00.0", f"{port}/0000:42:00.0"
    uuid = "a1b2c3d4-0000-4000-8000-000000000001"
    attributes = {"class": "0x030200", "vendor": "0x10de", "device": "0x2330", "subsystem_vendor": "0x10de"}
    attributes |= {"subsystem_device": "0x16c1", "numa_node": "0", "local_cpulist": "0-3"}
    attributes |= {"resource": "\n".join(f"0x{n:x} 0x{n:x} 0x0" for n in range(13))}
    files = {f"{place}/{name}": value for place in (port, vf, pf, parent) for name, value in attributes.items()}
    files |= {f"{place}/{name}": "SECRET" for place in (port, vf, pf, parent) for name in SECRETS}
    files |= {"devices/system/node/node0/cpulist": "0-3", "devices/system/node/node0/distance": "10"}
    files |= {"devices/system/node/node0/meminfo": "SECRET", "class/dmi/id/product_serial": "SECRET"}
    links = {f"bus/pci/devices/{place.rpartition('/')[2]}": f"../../../{place}" for place in (port, vf, pf, parent)}
    links |= {f"{vf}/physfn": "../0000:41:00.0", f"{vf}/driver": "../../../SECRET"}
    links |= {f"bus/mdev/devices/{uuid}": f"../../../{parent}/{uuid}"}
    tree = MemoryTree({path: value.encode() for path, value in files.items()}, links)
    text = record(tree)

    assert "SECRET" not in text
    check("recording/everything.sysfs", text.replace(__version__, "VERSION"))
    assert record(DirectoryTree(str(unpack(tree, tmp_path)))) == text


@pytest.mark.parametrize(
    ("extra", "difference"),
    [
        pytest.param("devices/system/node/node7", "NUMA node 7", id="a node without a readable attribute"),
        pytest.param("bus/pci/devices/0000:42:00.0", "PCI function 0000:42:00.0", id="a function without any"),
    ],
)
def test_a_tree_that_a_recording_cannot_hold_is_refused(tmp_path: Path, extra: str, difference: str) -> None:
    """Empty folders; no kernel makes such ones."""
    folder = unpack(parse_recording(host({"pci0000:40/0000:41:00.0": 0})), tmp_path)
    (folder / extra).mkdir()

    with pytest.raises(SysfsError) as refusal:
        record(DirectoryTree(str(folder)))

    assert str(refusal.value) == f"cannot record this tree, its recording reads differently: {difference}"


def test_an_empty_tree_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bus/pci/devices").mkdir(parents=True)

    with pytest.raises(SysfsError, match=r"^cannot record this tree: it holds neither "):
        record(DirectoryTree(str(tmp_path)))


def test_the_module_records_where_there_is_no_command_line(tmp_path: Path) -> None:
    (tmp_path / "host.sysfs").write_text(TEXT)
    done, refused = (
        subprocess.run([sys.executable, "-m", "hook.recording", path], capture_output=True, text=True, check=False)
        for path in (str(tmp_path / "host.sysfs"), "missing")
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, record(TREE), "")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == "python3 -m hook.recording: cannot read sysfs at missing: there is no such directory\n"


# Hostile and broken input.


def test_links_out_of_an_archive_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("1")
    where = "sys/devices/system/node/node0/"
    tree = opened(
        tmp_path,
        tar(
            member(f"{where}far", kind=tarfile.SYMTYPE, link="../../../../../secret"),
            member(f"{where}absolute", kind=tarfile.SYMTYPE, link="/etc/passwd"),
            member(f"{where}device", kind=tarfile.CHRTYPE),
            member(f"{where}pipe", kind=tarfile.FIFOTYPE),
            prefix="sys/",
        ),
    )
    names = ("far", "absolute", "device", "pipe")

    assert [tree.read(f"devices/system/node/node0/{name}") for name in names] == [None] * 4


TOO_LONG = "devices/" + "a/" * 2044 + "a"  # 4,097 characters


@pytest.mark.parametrize("name", ["../../etc/cron.d/x", "/etc/passwd", "sys/../../x", "..", ".", TOO_LONG])
def test_members_outside_are_passed_over(tmp_path: Path, name: str) -> None:
    assert opened(tmp_path, tar(member(name, b"1"), prefix="sys/")).items() == TREE.items()


def test_the_longest_path_is_read(tmp_path: Path) -> None:
    assert opened(tmp_path, tar(member(TOO_LONG[1:], b"1"))).read(TOO_LONG[1:]) == b"1"


def test_nothing_is_written(tmp_path: Path) -> None:
    opened(tmp_path, tar(member("../written", b"1"), member(str(tmp_path / "too"), b"1")))

    assert [path.name for path in tmp_path.iterdir()] == ["recording"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "it holds neither bus/pci/devices nor devices/system/node", id="nothing"),
        pytest.param(b"\xff\xfe\x00garbage", "found neither a tar archive nor UTF-8 text", id="no text"),
        pytest.param(b"hello\n", "line 1 is 'hello', expected 'path = value'", id="another text"),
        pytest.param(b"PK\x03\x04", "line 1 is ", id="a zip archive"),
        pytest.param(b"\x1f\x8b", "Compressed file ended before", id="two bytes of a gzip"),
        pytest.param(b"\x1f\x8b\x07garbage", "Unknown compression method", id="an unknown kind of gzip"),
        pytest.param(GZIPPED[:-20], "ended before the end-of-stream", id="half a gzip"),
        pytest.param(GZIPPED[:10] + b"\xff" * 100, "Error -3 while decompressing", id="a gzip with a hole"),
        pytest.param(GZIPPED[:-8] + bytes(8), "CRC check failed", id="a gzip with a bad sum"),
        pytest.param(zipped(bytes(200 << 20)), "it is over 33554432 bytes", id="a gzip bomb"),
        pytest.param(bytes((32 << 20) + 1), "it is over 33554432 bytes", id="a file that is too large"),
        pytest.param(
            tar(tree=MemoryTree({"etc/passwd": b"root"}, {})), "it holds neither", id="an archive of something else"
        ),
        pytest.param(
            tar(prefix="three/folders/down/"), "at the top or below one or two folders", id="a tree three folders down"
        ),
        pytest.param(tar()[:700], "it is a broken tar archive: ", id="half a tar"),
        pytest.param(tar()[:400] + b"\xff" * 200, "it is a broken tar archive: ", id="a tar with a hole"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "recording"
    path.write_bytes(content)

    with pytest.raises(SysfsError) as refusal:
        open_sysfs(str(path))

    assert str(refusal.value).startswith(f"cannot read the recording {path}: ")
    assert message in str(refusal.value)


def test_an_archive_of_as_many_entries_as_fit_is_read(tmp_path: Path) -> None:
    """An entry has 512 bytes, so the limit of bytes is one of entries: 65,536."""
    entry = member("sys/devices/system/node/node0/cpulist")[0].tobuf(tarfile.USTAR_FORMAT)

    assert all_functions(opened(tmp_path, entry * ((32 << 20) // len(entry)))) == ()


@pytest.mark.parametrize("path", ["missing", "pipe"])
def test_what_is_not_there_is_refused(tmp_path: Path, path: str) -> None:
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(SysfsError, match=rf"^cannot read sysfs at {tmp_path}/{path}: there is no such directory$"):
        open_sysfs(str(tmp_path / path))


def mutations(content: bytes, count: int) -> Mapping[int, bytes]:
    """Copies with a few bytes changed, always the same ones."""
    found = {}
    for seed in range(count):
        chance = random.Random(seed)
        changed = bytearray(content)
        for _ in range(chance.randint(1, 12)):
            changed[chance.randrange(len(changed))] = chance.choice((0, 0x30, 0x37, 0x80, 0xFF, chance.randrange(256)))
        found[seed] = bytes(changed[: chance.choice((len(changed), chance.randrange(len(changed)))) or 1])
    return found


@pytest.mark.parametrize(
    "content", [tar(prefix="sys/"), zipped(tar(prefix="sys/")), TEXT.encode()], ids=["tar", "tar.gz", "text"]
)
def test_a_damaged_recording_is_read_or_refused_and_nothing_else(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "recording"
    unexpected = {}
    for seed, damaged in mutations(content, 500).items():
        path.write_bytes(damaged)
        try:
            tree = open_sysfs(str(path))
            read_host(tree, all_functions(tree), ())
        except SysfsError:
            continue
        except Exception as error:  # noqa: BLE001 - that is what is looked for
            unexpected[seed] = repr(error)

    assert unexpected == {}
