"""Says how many mutants of the core the tests killed, and why the others live; must not run any (make mutants does)."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

REQUIRED_PERCENT = 90.0

_IMPORT = "runs when the module is imported, before a mutant is switched on"
_OVERWRITTEN = "a field that replace() sets right after"
_EQUALLY_LONG = "zip of two sequences that are equally long, or of which the shorter counts by default too"
_NO_NONE = "nothing has the key None"
# Why no test can tell a mutant from the original: by function, and by a part of the line as the mutant has it.
REASONS: Mapping[str, Mapping[str, str]] = {
    "config.x__option": {"": _IMPORT},
    "config.x__word": {"": _IMPORT},
    "firmware.x_window_bytes": {"max(1, bits": "QEMU has no CPU with less than 32 address bits"},
    "host.xǁHostTopologyǁfunction_of": {"or True else None": _NO_NONE},
    "host.xǁHostTopologyǁphysical_of": {"or True else None": _NO_NONE},
    "layout.x__common_bridges": {"min((leaf.bridges": "a way that another one goes on from is less than it"},
    "layout.x__is_one_chip": {"or 1) >> 12": "a revision is the upper four bits, so 0 and 1 are one"},
    "layout.x_shape": {'"XXXX" if layout': "one word for every device, whichever it is"},
    "locality.x__common": {"zip(first, second": _EQUALLY_LONG},
    "nccl.x__cpu_mask": {"< MAX_VALUE_LENGTH": "a mask has 9 characters for each group, less one: never 254"},
    "nccl.x__lines": {"zip(names": _EQUALLY_LONG},
    "nccl.x_guest_system": {
        "and function is None": "what is placed has a cell and a function",
        "class_code or 1": "what is listed has a class",
        "default=1": "a mask has groups of 32 CPUs, so 0 and 1 are one",
    },
    "nccl.x_host_system": {
        "class_code or 1": "what is listed has a class",
        "default=1": "a mask has groups of 32 CPUs, so 0 and 1 are one",
    },
    "numbering.x__root_slots": {"range(MAX_SLOT, +1": "slots 0 and 1 are reserved in any case"},
    "numbering.x_number": {"zip(shapes": _EQUALLY_LONG},
    "numbering.xǁ_Runǁ_children": {"zip(children": _EQUALLY_LONG},
    "plan.x__guest_function": {"PciFunction(": _OVERWRITTEN},
    "plan.xǁ_Plannerǁ_chain": {"self.chains.get(None)": "what is kept saves time alone"},
    "plan.xǁ_Plannerǁ_find_lost_rdma": {
        "count - kind": "two counts below zero have the same product",
        "zip(counts": _EQUALLY_LONG,
    },
    "plan.xǁ_Plannerǁ_kept": {"or True else None": _NO_NONE},
    "plan.xǁ_Plannerǁ_left": {"replace(device, reason=reason)": "a device is left before anything else is decided"},
    "plan.xǁ_Plannerǁ_with_node": {"DevicePlan(": _OVERWRITTEN},
    "slots.x__connection": {'or "XXXX"': "no model begins or ends like this, nor does the empty one"},
    "slots.x__controller_connection": {'or "XXXX"': "no model begins like this, nor does the empty one"},
    "slots.x_endpoints": {
        "sorted(found": "no two devices have one rank and key, so nothing else is compared",
        "default=1": "there is no device that this could come before or after",
    },
    "slots.x_first_index": {"bridge_index or 1": "KUBEVIRT_PORTS is more"},
}


def statuses() -> dict[str, str]:
    """What became of each mutant, by its name below `hook.`."""
    return dict(re.findall(r"^\s*hook\.(\S+): ([a-z ]+)$", _mutmut("results", "--all", "true"), re.MULTILINE))


def change(name: str) -> tuple[str, str]:
    """The lines that a mutant takes away and those that it has instead, stripped and joined."""
    # What is before the first hunk, and the rest of its @@ line, is the header of the difference.
    difference = _mutmut("show", f"hook.{name}").partition("\n@@")[2].splitlines()[1:]
    before, after = ([line[1:].strip() for line in difference if line.startswith(sign)] for sign in "-+")
    return " ".join(before), " ".join(after)


def reason(name: str, before: str, after: str) -> tuple[str, str] | None:
    """Function and part of the reason why this mutant lives; None if nobody knows.

    A line that is only taken away is looked for in what it was.
    """
    function = name.rpartition("__mutmut_")[0]
    part = next((part for part in REASONS.get(function, {}) if part in (after or before)), None)
    return (function, part) if part is not None else None


def _mutmut(*arguments: str) -> str:
    program = Path(sys.executable).with_name("mutmut")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout


def main() -> int:
    found = statuses()
    counts = Counter(found.values())
    tried = len(found) - counts["not checked"]
    killed = counts["killed"] + counts["timeout"]
    unexplained = 0
    unused = {(function, part) for function, parts in REASONS.items() for part in parts}
    for name, status in sorted(found.items()):
        if status not in ("killed", "timeout", "not checked"):
            before, after = change(name)
            key = reason(name, before, after)
            unexplained += key is None
            unused.discard(key or ("", ""))
            why = REASONS[key[0]][key[1]] if key is not None else "NO REASON"
            print(f"{name} {status}: {why}\n  - {before}\n  + {after}")
    if counts["not checked"]:
        unused.clear()  # they may be for what was not tried
    for function, part in sorted(unused):
        print(f"no mutant of {function} lives for the reason of {part!r}")
    percent = 100 * killed / tried if tried else 0.0
    print(
        f"{killed} of {tried} mutants are killed: {percent:.1f} %, {REQUIRED_PERCENT:.0f} are required; "
        f"{unexplained} live without a reason, none may; {dict(counts)}"
    )
    return percent < REQUIRED_PERCENT or unexplained > 0 or bool(unused)


if __name__ == "__main__":
    sys.exit(main())
