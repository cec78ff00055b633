"""Says how many mutants of the core the tests killed, and why the others live; must not run any (make mutants does)."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

REQUIRED_PERCENT = 90.0

# Why no test can tell a mutant from the original. The others are printed as unexplained.
_IMPORT = "runs when the module is imported, before a mutant is switched on"
_STRICT = "zip of two sequences that are equally long, or where that is what is asked"
REASONS = {
    "config.x__option": _IMPORT,
    "config.x__word": _IMPORT,
    "locality.x__common": _STRICT,
    "numbering.xǁ_Runǁ_children": _STRICT,
    "numbering.x__root_slots": "slots 0 and 1 are reserved in any case",
    "layout.x__common_bridges": "a way that another one goes on from is less than it",
    "layout.x__is_one_chip": "a revision is the upper four bits, so 0 and 1 are one",
    "plan.xǁ_Plannerǁ_room": "buses run out before indexes do, and no own controller has index 0 or 1",
    "plan.xǁ_Plannerǁ_unnumbered": "is_changed is set right after",
    "slots.x__controller_connection": "no model begins with virtio either way",
    "plan.xǁ_Plannerǁ_left": "a device is left before anything else is decided",
    "plan.xǁ_Plannerǁ_kept": "no cell stands for None",
    "plan.xǁ_Plannerǁ_find_lost_rdma": "two counts below zero have the same product; zip of two pairs",
    "plan.x__guest_function": "fields that replace() sets right after",
    "plan.xǁPlanǁguest_topology": "an index is a bridge or a root, never neither",
}


def statuses() -> dict[str, str]:
    """What became of each mutant, by its name below `hook.`."""
    shown = subprocess.run(
        [Path(sys.executable).with_name("mutmut"), "results", "--all", "true"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return dict(re.findall(r"^\s*hook\.(\S+): ([a-z ]+)$", shown, re.MULTILINE))


def main() -> int:
    found = statuses()
    counts = Counter(found.values())
    tried = len(found) - counts["not checked"]
    killed = counts["killed"] + counts["timeout"]
    by_function = Counter(
        name.rpartition("__mutmut_")[0]
        for name, status in found.items()
        if status in ("survived", "no tests", "suspicious")
    )
    for function, count in sorted(by_function.items()):
        print(f"{count:4} live in {function}: {REASONS.get(function, 'unexplained')}")
    percent = 100 * killed / tried if tried else 0.0
    print(
        f"{killed} of {tried} mutants are killed: {percent:.1f} %, {REQUIRED_PERCENT:.0f} are required; {dict(counts)}"
    )
    return percent < REQUIRED_PERCENT


if __name__ == "__main__":
    sys.exit(main())
