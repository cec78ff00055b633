"""Names from pci.ids: what is found, what is passed over, and that nothing is needed."""

from pathlib import Path

import pytest

from hook.pci_ids import PATHS, PciIds, parse, read

FILE = Path(__file__).with_name("pci.ids")


def test_an_excerpt() -> None:
    assert parse(FILE.read_text()) == PciIds(
        vendors={
            0x1000: "Broadcom / LSI",
            0x10B5: "PLX Technology, Inc.",
            0x10DE: "NVIDIA Corporation",
            0x144D: "Samsung Electronics Co Ltd",
            0x15B3: "Mellanox Technologies",
            0x8086: "Intel Corporation",
        },
        devices={
            (0x1000, 0xC010): "PEX890xx PCIe Gen 4 Switch",
            (0x10B5, 0x8764): "PEX 8764 64-lane, 16-port PCI Express Gen 3 Switch",
            (0x10DE, 0x1DB5): "GV100GL [Tesla V100 SXM2 32GB]",
            (0x10DE, 0x2335): "GH100 [H200 SXM 141GB]",
            (0x144D, 0xA824): "NVMe SSD Controller PM173X",
            (0x15B3, 0x1013): "MT27700 Family [ConnectX-4]",
            (0x15B3, 0x101E): "ConnectX Family mlx5Gen Virtual Function",
        },
        classes={
            0x0200: "Ethernet controller",
            0x0207: "Infiniband controller",
            0x0300: "VGA compatible controller",
            0x0302: "3D controller",
            0x0604: "PCI bridge",
        },
    )


def test_names_of_devices_are_those_of_lspci() -> None:
    ids = read(str(FILE))

    assert ids.device(0x10DE, 0x2335) == "NVIDIA Corporation GH100 [H200 SXM 141GB]"
    assert ids.device(0x10DE, 0xABC) == "NVIDIA Corporation Device 0abc"
    assert [ids.device(0x1234, 1), ids.device(None, 1), ids.device(0x10DE, None)] == [None] * 3
    assert [ids.class_name(0x030200), ids.class_name(0x030300), ids.class_name(None)] == ["3D controller", None, None]


def test_garbage_has_no_names() -> None:
    text = "10de NVIDIA\n10de  a\x00b\n\t2335  GPU\n  \nC 03\nzzzz  Nobody\n\t\t10de 1249  subsystem\n"

    assert parse(text) == PciIds(devices={(0, 0x2335): "GPU"})


def test_a_file_that_was_asked_for_must_be_there() -> None:
    with pytest.raises(FileNotFoundError):
        read("missing")


def test_the_machines_own_is_read_if_there_is_one() -> None:
    has_one = any(Path(path).exists() for path in PATHS)

    assert (read(None).vendors.get(0x8086) == "Intel Corporation") is has_one
