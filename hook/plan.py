"""Decides for every passed-through device where it goes and why; must not read, write or log anything.

host node 0              guest cell 0: pcie.0 ── expander (busNr, node 0) ── root port ── device
  pci0000:40 ── device                                                    └─ root port ── device
host node 1              guest cell 1: pcie.0 ── expander (busNr, node 1) ── root port ── device
  pci0000:c0 ── device
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from hook import firmware
from hook.address import MAX_BUS, PciAddress
from hook.config import Config, Devices, Extra, Layout, Mode, RiskyBars, Unaligned
from hook.errors import Finding, Severity
from hook.guest import Controller, FwCfgLine, GuestAddress, GuestDomain, Hostdev, Kind, Model
from hook.host import SELF_DISTANCE, HostTopology, NodeSource, PciFunction
from hook.layout import ExpanderShape, Placed, Switch, shape
from hook.locality import top_switch
from hook.numbering import Expander, Numbered, Place, Room, Shortage, number, own_alias
from hook.slots import KUBEVIRT_LAST_PORT_INDEX, KUBEVIRT_PORTS, first_index, forecast

LOST_RDMA = "gpudirect-lost"  # finding

_BRIDGE_CLASS = 0x060400
_FALLBACK = (Layout.SWITCH, Layout.HOST_BRIDGE, Layout.NODE)
_MACHINES = {"x86_64": ("q35", "pc-q35-"), "aarch64": ("virt", "virt-")}


class Action(StrEnum):
    """What happens to a device."""

    PLACED = "placed"  # behind an expander of the hook
    KEPT = "kept"  # behind an expander of somebody else
    LEFT = "left"  # where libvirt or the user puts it
    EXCLUDED = "excluded"  # the policy says that the hook has no business with it


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """The decision for one device."""

    hostdev: Hostdev
    action: Action
    reason: str
    host_node: int | None = None
    host_node_from: NodeSource | None = None
    cell: int | None = None  # where it is put or kept
    place: Place | None = None  # only when placed
    address: GuestAddress | None = None  # in the answer; None: libvirt chooses

    def function(self, host: HostTopology) -> PciFunction | None:
        """The host function that stands for the device, as HostTopology.function_of says."""
        return host.function_of(self.hostdev.source)


def _guest_function(
    address: PciAddress, root: str, bridges: Sequence[PciAddress], cell: int | None, host_function: PciFunction | None
) -> PciFunction:
    function = host_function or PciFunction(address=address, root=root, above=(), bridges=(), class_code=_BRIDGE_CLASS)
    return replace(
        function,
        address=address,
        root=root,
        above=tuple(bridges),
        bridges=tuple(bridges),
        numa_node=cell,
        local_cpus=None,
        physical_function=None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that will be written, and everything that the user should know."""

    layout: Layout  # the one that is used; simpler than wanted when that does not fit
    is_changed: bool  # False: the domain stays as it is, byte for byte
    controllers: tuple[Controller, ...]  # all that the hook owns
    expanders: tuple[Expander, ...]
    devices: tuple[DevicePlan, ...]  # in document order
    findings: tuple[Finding, ...]
    bridge_bdfs: Mapping[int, PciAddress] = field(default_factory=dict)  # guest addresses, by controller index
    distances: Mapping[int, Mapping[int, int]] = field(default_factory=dict)  # to be written: cell -> cell -> value
    is_maxphysaddr_added: bool = False
    fw_cfg: tuple[FwCfgLine, ...] = ()  # by hook.nccl
    cliques: Mapping[str, int] = field(default_factory=dict)  # alias -> clique id; by hook.clique

    def guest_topology(self, host: HostTopology) -> HostTopology:
        """The placed devices as the guest's sysfs will show them: address, bridges above, node.

        Vendor, device and class are the host's, since they are passed through.
        """
        above = {controller.index: controller.address for controller in self.controllers}
        roots = {expander.index: expander for expander in self.expanders}
        functions: dict[PciAddress, PciFunction] = {}
        for device in self.devices:
            if device.place is None:
                continue
            bridges: list[PciAddress] = []
            index = device.place.address.bus
            while index not in roots and (address := above.get(index)) is not None:
                bridges.insert(0, self.bridge_bdfs[index])
                index = address.bus
            root = f"devices/pci0000:{roots[index].bus_nr:02x}"
            for depth, bridge in enumerate(bridges):
                functions[bridge] = _guest_function(bridge, root, bridges[:depth], device.cell, None)
            bdf = device.place.guest_bdf
            functions[bdf] = _guest_function(bdf, root, bridges, device.cell, device.function(host))
        return HostTopology(functions=functions, mediated_devices={}, nodes={})

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that policy strict refuses."""
        return tuple(finding for finding in self.findings if finding.severity is not Severity.INFO)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellMap:
    """Which guest cell stands for which host node; never by equal numbers."""

    node_of_cell: Mapping[int, int]
    cell_of_node: Mapping[int, int]
    findings: tuple[Finding, ...]


def map_cells(guest: GuestDomain, host: HostTopology) -> CellMap:
    """Find the host node of each guest cell: by memnode, else by the pins of its vCPUs.

    A cell whose memory or vCPUs span nodes stands for none. Of two cells for one node the lower
    id counts.
    """
    node_of_cell: dict[int, int] = {}
    cell_of_node: dict[int, int] = {}
    findings = []
    for cell in sorted(guest.cells, key=lambda c: c.id):
        memory_nodes = guest.memnodes.get(cell.id, frozenset())
        pinned = [guest.pins.get(vcpu) for vcpu in cell.vcpus]
        cpu_node = (
            host.node_within(frozenset().union(*(cpus for cpus in pinned if cpus))) if pinned and all(pinned) else None
        )
        memory_node = next(iter(memory_nodes)) if len(memory_nodes) == 1 else None
        node = cpu_node if memory_node is None else memory_node
        subject = f"cell {cell.id}"
        if node is None:
            findings.append(
                Finding(
                    Severity.INFO,
                    "spanning-cell",
                    subject,
                    "its memory and vCPUs are not bound to one host NUMA node, so no device belongs to it",
                )
            )
            continue
        if cpu_node is not None and cpu_node != node:
            findings.append(
                Finding(
                    Severity.INFO,
                    "memory-not-with-cpus",
                    subject,
                    f"memory is on host node {node}, vCPUs on host node {cpu_node}; the memory decides",
                )
            )
        node_of_cell[cell.id] = node
        first = cell_of_node.setdefault(node, cell.id)
        if first != cell.id:
            findings.append(
                Finding(
                    Severity.INFO,
                    "two-cells-one-node",
                    subject,
                    f"host node {node} is also cell {first}; its devices go to cell {first}",
                )
            )
    return CellMap(node_of_cell=node_of_cell, cell_of_node=cell_of_node, findings=tuple(findings))


def unchanged(guest: GuestDomain, config: Config, finding: Finding) -> Plan:
    """The plan that leaves a domain alone, for one reason."""
    action = Action.EXCLUDED if config.mode is Mode.OFF else Action.LEFT
    return Plan(
        layout=config.layout,
        is_changed=False,
        controllers=tuple(c for c in guest.controllers if c.is_own),
        expanders=(),
        devices=tuple(
            DevicePlan(hostdev=h, action=action, reason=finding.message, address=h.address) for h in guest.hostdevs
        ),
        findings=(finding,),
    )


def make_plan(
    guest: GuestDomain, host: HostTopology, config: Config, pci_addressed: frozenset[str], is_on_root_complex: bool
) -> Plan:
    """Plan one domain.

    pci_addressed: NAMEs of the interfaces whose guest address the user chose.
    is_on_root_complex: the user wants all devices on pcie.0.
    """
    reason = _not_applicable(guest, config)
    cells = map_cells(guest, host)
    if reason is None and not cells.cell_of_node:
        reason = _not(
            guest, "no-aligned-cell", "no guest NUMA cell stands for one host node (guestMappingPassthrough?)"
        )
    if reason is not None:
        return unchanged(guest, config, reason)
    planner = _Planner(guest=guest, host=host, config=config, cells=cells)
    planner.findings.extend(cells.findings)
    planner.findings.extend(Finding(Severity.INFO, "unreadable-sysfs", "", problem) for problem in host.problems)
    for hostdev in guest.hostdevs:
        # Only interfaces can have one; a GPU may have the name of an interface.
        is_chosen = hostdev.is_virtual_function and hostdev.name in pci_addressed
        planner.decide(hostdev, is_users=is_on_root_complex or is_chosen)
    planner.check_names()
    planner.check_expanders()
    return planner.finish()


def can_hold_expanders(arch: str, machine: str) -> bool:
    """True when this machine type of this architecture (as in the domain XML) has PCIe expander buses."""
    names = _MACHINES.get(arch, ())
    return any(machine == name or (name.endswith("-") and machine.startswith(name)) for name in names)


def _not(guest: GuestDomain, code: str, message: str) -> Finding:
    """A reason to do nothing; it matters only to a VM with devices."""
    return Finding(Severity.WARNING if guest.hostdevs else Severity.INFO, code, "", message)


def _not_applicable(guest: GuestDomain, config: Config) -> Finding | None:
    if config.mode is Mode.OFF:
        return Finding(Severity.INFO, "mode-off", "", "the hook is switched off for this VM")
    if not guest.hostdevs and not any(controller.is_own for controller in guest.controllers):
        return Finding(Severity.INFO, "no-devices", "", "the VM has no passed-through PCI device (migration target?)")
    if not can_hold_expanders(guest.arch, guest.machine):
        return _not(
            guest, "unsupported-machine", f"machine {guest.machine!r} on {guest.arch} cannot hold PCIe expander buses"
        )
    if guest.is_grace:
        # VEP 199: a guest address on these hostdevs is an error for KubeVirt, which places them itself.
        return Finding(Severity.INFO, "grace", "", "KubeVirt places the devices of a Grace VM itself")
    return None


def _is_whole(hostdev: Hostdev, function: PciFunction) -> bool:
    """False for an mdev and a VF, which share no slot with others of their card."""
    is_virtual_function = hostdev.is_virtual_function or function.is_virtual_function
    return hostdev.kind is Kind.PCI and not is_virtual_function


def _is_of_pcie_0(own: Controller) -> bool:
    """True for a bridge of the hook and its port; all its other ports are behind an expander."""
    is_on_root = own.address is None or own.address.bus == 0
    return own.model == Model.PCI_BRIDGE or (own.model == Model.ROOT_PORT and is_on_root)


@dataclass(slots=True)
class _Planner:
    guest: GuestDomain
    host: HostTopology
    config: Config
    cells: CellMap
    findings: list[Finding] = field(default_factory=list)
    decided: list[DevicePlan] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)
    used_names: set[str] = field(default_factory=set)
    by_index: Mapping[int, Controller] = field(init=False)
    chains: dict[int, list[Controller]] = field(init=False, default_factory=dict)  # by bus of an address

    def __post_init__(self) -> None:
        self.by_index = {controller.index: controller for controller in self.guest.controllers}

    def decide(self, hostdev: Hostdev, *, is_users: bool) -> None:
        """Decide everything about a device but its number."""
        device = self._with_node(hostdev)
        self.decided.append(self._outcome(device, is_users=is_users))

    def _names(self, hostdev: Hostdev, wanted: Mapping[str, object] | frozenset[str]) -> str | None:
        """The name by which the policy means this device, or None."""
        found = [name for name in (hostdev.name, str(hostdev.source)) if name in wanted]
        self.used_names.update(found)
        return found[0] if found else None

    def _with_node(self, hostdev: Hostdev) -> DevicePlan:
        # An address behind our own controllers goes with them.
        address = None if self._is_behind_own(hostdev) else hostdev.address
        device = DevicePlan(hostdev=hostdev, action=Action.LEFT, reason="", address=address)
        name = self._names(hostdev, self.config.numa_nodes)
        if name is not None:
            return replace(device, host_node=self.config.numa_nodes[name], host_node_from=NodeSource.OVERRIDE)
        function = device.function(self.host)
        found = self.host.node_of(function.address) if function is not None else None
        return device if found is None else replace(device, host_node=found[0], host_node_from=found[1])

    def _outcome(self, device: DevicePlan, *, is_users: bool) -> DevicePlan:
        hostdev = device.hostdev
        function = device.function(self.host)
        if self._names(hostdev, self.config.exclude) is not None:
            return replace(device, action=Action.EXCLUDED, reason="named by exclude")
        # A device that sysfs does not know may be a GPU, and becomes a finding below.
        is_other = function is not None and not function.is_gpu
        if self.config.devices is Devices.GPU and is_other:
            return replace(device, action=Action.EXCLUDED, reason="no GPU or accelerator, and devices is gpu")
        expander = self._foreign_expander(hostdev)
        if expander is not None:
            return self._kept(device, expander)
        if is_users and not self._is_behind_own(hostdev):
            chosen = hostdev.address or "by annotation"
            return self._left(device, "user-address", f"the user chose its guest address: {chosen}")
        if hostdev.address is not None and not self._is_ours_to_move(hostdev):
            return self._left(
                device,
                "foreign-address",
                f"its guest address {hostdev.address} is neither libvirt's choice nor the hook's",
            )
        if function is None:
            return self._left(device, "unknown-device", f"sysfs does not know {hostdev.source}")
        if device.host_node is None:
            return self._left(
                device, "unknown-node", f"the host does not say on which NUMA node {function.address} is (numa_node -1)"
            )
        left = self._left_for_its_bars(device, function)
        if left is not None:
            return left
        if device.host_node_from not in (NodeSource.NUMA_NODE, NodeSource.OVERRIDE):
            self._find(
                Severity.INFO, "inferred-node", hostdev.name, f"host node {device.host_node} by {device.host_node_from}"
            )
        return self._placed(device, function, device.host_node)

    def _left_for_its_bars(self, device: DevicePlan, function: PciFunction) -> DevicePlan | None:
        """Leave a device that may lose BARs behind an expander; None: it may not, as an mdev, whose BARs are others."""
        is_wanted = self.config.risky_bars is RiskyBars.PLACE
        if device.hostdev.kind is Kind.MDEV:
            return None
        if self.guest.arch == "aarch64":
            if not is_wanted and firmware.is_tight(self._sharing_a_port(device.hostdev, function)):
                return self._left(
                    device,
                    "tight-window",
                    "its BARs or ROM have several sizes, and Linux on aarch64 then finds too little room behind an "
                    "expander; with a guest kernel that keeps the firmware's layout set risky-bars to place",
                )
        elif self.guest.address_space.is_efi and function.has_io_bar:
            if not is_wanted:
                return self._left(
                    device,
                    "io-bar",
                    "it has an I/O BAR, for which OVMF of 2022 takes the BARs from every device behind an expander; "
                    "with a newer OVMF set risky-bars to place",
                )
            if sum(placed.function.has_io_bar for placed in self.placed) >= firmware.OVMF_IO_DEVICES:
                return self._left(
                    device,
                    "io-bar",
                    f"it has an I/O BAR, and OVMF has room for those of {firmware.OVMF_IO_DEVICES} devices "
                    "behind expanders",
                )
        return None

    def _sharing_a_port(self, hostdev: Hostdev, function: PciFunction) -> list[PciFunction]:
        """The functions of its card that the VM has, itself included, as the layouts put them together."""
        if not _is_whole(hostdev, function):
            return [function]
        known = [(h, f) for h in self.guest.hostdevs if (f := self.host.function_of(h.source)) is not None]
        return [f for h, f in known if f.address.card == function.address.card and _is_whole(h, f)]

    def _placed(self, device: DevicePlan, function: PciFunction, node: int) -> DevicePlan:
        cell = self.cells.cell_of_node.get(node)
        reason = f"host node {node} ({device.host_node_from}) is cell {cell}"
        if cell is None:
            nearest = self.host.nearest(node, frozenset(self.cells.cell_of_node))
            if self.config.unaligned is Unaligned.LEAVE or nearest is None:
                why = "unaligned is leave" if nearest is not None else "no cell is strictly nearest"
                return self._left(device, "no-cell", f"no guest cell stands for host node {node}, and {why}")
            cell = self.cells.cell_of_node[nearest]
            reason = f"no guest cell stands for host node {node}; the nearest is cell {cell} (host node {nearest})"
            self._find(Severity.WARNING, "nearest-cell", device.hostdev.name, reason)
        self.placed.append(
            Placed(
                key=device.hostdev.key,
                cell=cell,
                function=function,
                is_whole=_is_whole(device.hostdev, function),
            )
        )
        return replace(device, action=Action.PLACED, reason=reason, cell=cell)

    def _left(self, device: DevicePlan, code: str, reason: str) -> DevicePlan:
        self._find(Severity.WARNING, code, device.hostdev.name, reason)
        return replace(device, action=Action.LEFT, reason=reason)

    def _kept(self, device: DevicePlan, expander: Controller) -> DevicePlan:
        name, node = device.hostdev.name, device.host_node
        wanted = self.cells.cell_of_node.get(node) if node is not None else None
        where = f"behind expander {expander.index} of somebody else"
        if expander.cell is None:
            self._find(Severity.WARNING, "expander-without-node", name, f"{where}, which has no NUMA node")
        elif wanted is None:
            why = "its host node is unknown" if node is None else f"no guest cell is known for host node {node}"
            self._find(Severity.WARNING, "unverified-node", name, f"{where}, and {why}")
        elif wanted != expander.cell:
            self._find(
                Severity.WARNING,
                "wrong-node",
                name,
                f"{where} with cell {expander.cell}, but host node {node} is cell {wanted}",
            )
        return replace(device, action=Action.KEPT, reason=where, cell=expander.cell)

    def _find(self, severity: Severity, code: str, subject: str, message: str) -> None:
        self.findings.append(Finding(severity, code, subject, message))

    def _chain(self, address: GuestAddress | None) -> list[Controller]:
        """Controllers from just above an address up to, not including, pcie.0."""
        if address is None:
            return []
        bus, chain = address.bus, self.chains.get(address.bus)
        if chain is None:
            chain = self.chains[bus] = []
            while address is not None and (above := self.by_index.get(address.bus)) is not None and above not in chain:
                if above.model == Model.ROOT:
                    break
                chain.append(above)
                address = above.address
        return chain

    def _foreign_expander(self, hostdev: Hostdev) -> Controller | None:
        """The expander of somebody else above a device; None where a controller of the hook, which goes, is between."""
        chain = () if self._is_behind_own(hostdev) else self._chain(hostdev.address)
        return next((c for c in chain if c.model == Model.EXPANDER), None)

    def _is_behind_own(self, hostdev: Hostdev) -> bool:
        return any(controller.is_own for controller in self._chain(hostdev.address))

    def _is_ours_to_move(self, hostdev: Hostdev) -> bool:
        """True behind our own controllers, and where libvirt puts a device: alone on a plain root port of pcie.0.

        An index without a controller is one that libvirt would fill with such a port.
        """
        if self._is_behind_own(hostdev):
            return True
        address = hostdev.address
        if address is None or address.bus == 0:
            return address is None
        chain = self._chain(address)
        return not chain or (len(chain) == 1 and chain[0].model == Model.ROOT_PORT)

    def check_names(self) -> None:
        """Report names in the policy that no device has."""
        for name in sorted({*self.config.exclude, *self.config.numa_nodes} - self.used_names):
            self._find(Severity.INFO, "unknown-name", name, "the policy names a device that the VM does not have")

    def check_expanders(self) -> None:
        """Report expanders of others that hold no device."""
        held = {above.index for address in {e.address for e in self.guest.endpoints} for above in self._chain(address)}
        for controller in self.guest.controllers:
            if controller.model == Model.EXPANDER and not controller.is_own and controller.index not in held:
                self._find(Severity.INFO, "empty-expander", f"controller {controller.index}", "no device is behind it")

    def finish(self) -> Plan:
        """Number what is placed, in the layout wanted or a simpler one; when none fits, leave the whole domain."""
        numbered: Numbered | Shortage = Numbered(controllers=(), expanders=(), places={}, bridge_bdfs={})
        bridge: tuple[Controller, ...] = ()
        layout = self.config.layout
        if self.placed:
            room, bridge = self._room()
            for layout in _FALLBACK[_FALLBACK.index(self.config.layout) :]:
                shapes = shape(layout, self.host, self.placed)
                if self._is_switch_risky(shapes):
                    self._find(
                        Severity.WARNING,
                        "no-switch",
                        "",
                        f"layout {layout} is not used: Linux on aarch64 finds too little room behind a switch",
                    )
                    continue
                numbered = number(shapes, room)
                if not isinstance(numbered, Shortage):
                    break
                self._find(Severity.WARNING, "no-room", "", f"layout {layout} does not fit: {numbered}")
        if isinstance(numbered, Shortage):
            return self._unnumbered(str(numbered))
        if layout is not Layout.SWITCH:
            self._find_lost_rdma(layout)
        devices = tuple(
            replace(device, place=place, address=place.address)
            if (place := numbered.places.get(device.hostdev.key)) is not None
            else device
            for device in self.decided
        )
        distances = self._distances()
        # An mdev has not the BARs of its parent.
        functions = [d.function(self.host) for d in self.decided if d.hostdev.kind is Kind.PCI]
        passed = [function for function in functions if function is not None]
        # Every index below the hook's is a port on pcie.0.
        ports = min((controller.index for controller in numbered.controllers), default=KUBEVIRT_PORTS + 1) - 1
        is_maxphysaddr_added = self._needs_maxphysaddr(passed, ports)
        self._check_small_bars(passed)
        controllers = (*bridge, *numbered.controllers)
        return Plan(
            layout=layout,
            is_changed=bool(distances) or is_maxphysaddr_added or self._differs(controllers, devices),
            controllers=controllers,
            expanders=numbered.expanders,
            devices=devices,
            findings=tuple(self.findings),
            bridge_bdfs=numbered.bridge_bdfs,
            distances=distances,
            is_maxphysaddr_added=is_maxphysaddr_added,
        )

    def _is_switch_risky(self, shapes: Sequence[ExpanderShape]) -> bool:
        """True where a switch, with ports for BARs of several sizes below it, may leave them without room."""
        return (
            self.guest.arch == "aarch64"
            and self.config.risky_bars is RiskyBars.LEAVE
            and any(isinstance(child, Switch) for shape in shapes for child in shape.children)
        )

    def _find_lost_rdma(self, layout: Layout) -> None:
        """Say what a layout without switches costs: below one host switch NCCL lets GPU and NIC talk directly."""
        below: dict[tuple[int, PciAddress], list[int]] = {}
        for device in self.placed:
            switch = top_switch(device.function)
            kinds = [device.function.is_gpu, device.function.is_network]
            if switch is not None:
                counts = below.setdefault((device.cell, switch), [0, 0])
                below[(device.cell, switch)] = [count + kind for count, kind in zip(counts, kinds, strict=True)]
        pairs = sum(gpus * nics for gpus, nics in below.values())
        if pairs:
            self._find(
                Severity.INFO,
                LOST_RDMA,
                "",
                f"GPU-NIC pairs that share a switch on the host: {pairs}; in layout {layout} they are PHB, and "
                "GPUDirect RDMA needs NCCL_NET_GDR_LEVEL=PHB in the guest, or layout switch",
            )

    def _distances(self) -> Mapping[int, Mapping[int, int]]:
        """The host's distances between the nodes of the cells, when every cell has one of its own."""
        nodes = self.cells.node_of_cell
        cells = sorted(cell.id for cell in self.guest.cells)
        if self.config.distances is not Extra.AUTO or any(cell.has_distances for cell in self.guest.cells):
            return {}
        try:
            rows = {a: {b: self.host.nodes[nodes[a]].distances[nodes[b]] for b in cells} for a in cells}
        except KeyError:
            rows = {}
        # libvirt keeps 10 for a cell's distance to itself (virDomainNumaDefNodeDistanceParseXML).
        is_valid = all((value == SELF_DISTANCE) is (a == b) for a, row in rows.items() for b, value in row.items())
        if not rows or not is_valid:
            self._find(
                Severity.INFO, "no-distances", "", "the host's distance table does not cover one node for each cell"
            )
            return {}
        return rows

    def _needs_maxphysaddr(self, functions: Sequence[PciFunction], ports: int) -> bool:
        """Compare the large BARs with the room that firmware has for them; say so when it is not enough."""
        space = self.guest.address_space
        needed_bytes = firmware.needed_bytes(functions)
        window_bytes = firmware.window_bytes(self.guest.arch, space, ports)
        if window_bytes is None or needed_bytes <= window_bytes:
            return False
        is_possible = not space.has_maxphysaddr and space.cpu_mode == "host-model"
        is_added = is_possible and self.config.maxphysaddr is Extra.AUTO
        cure = "set maxphysaddr to auto" if is_possible else "give the guest more physical address bits"
        outcome = "maxphysaddr is added" if is_added else f"some or all of them will have no address; {cure}"
        self._find(
            Severity.INFO,
            "mmio-window",
            "",
            f"the devices' 64-bit BARs need {needed_bytes >> 30} GiB, firmware has about {window_bytes >> 30} GiB; "
            f"this is an MMIO window question, not NUMA: {outcome}",
        )
        return is_added

    def _check_small_bars(self, functions: Sequence[PciFunction]) -> None:
        """Compare the I/O and 32-bit BARs with the room that firmware has for them, with the hook or without."""
        io_devices = sum(function.has_io_bar for function in functions)
        if not self.guest.address_space.is_efi and io_devices > firmware.SEABIOS_IO_DEVICES:
            self._find(
                Severity.WARNING,
                "io-space",
                "",
                f"{io_devices} devices have an I/O BAR, and SeaBIOS hangs with more than "
                f"{firmware.SEABIOS_IO_DEVICES}, with the hook or without; use EFI firmware",
            )
        needed_bytes = firmware.needed_32bit_bytes(functions)
        if needed_bytes > firmware.WINDOW_32BIT_BYTES:
            self._find(
                Severity.INFO,
                "mmio32-window",
                "",
                f"the devices' 32-bit BARs need {needed_bytes >> 20} MiB, firmware has about "
                f"{firmware.WINDOW_32BIT_BYTES >> 20} MiB, with the hook or without",
            )

    def _unnumbered(self, why: str) -> Plan:
        """Half a plan is worse than none: everything that would have been placed is left."""
        devices = tuple(
            replace(d, action=Action.LEFT, cell=None, reason=f"there is no room: {why}")
            if d.action is Action.PLACED
            else d
            for d in self.decided
        )
        return Plan(
            layout=self.config.layout,
            is_changed=self._differs((), devices),
            controllers=(),
            expanders=(),
            devices=devices,
            findings=tuple(self.findings),
        )

    def _differs(self, controllers: Sequence[Controller], devices: Sequence[DevicePlan]) -> bool:
        """True when the domain has other controllers of the hook, or its devices other places."""
        own = sorted((c for c in self.guest.controllers if c.is_own), key=lambda c: c.index)
        return own != sorted(controllers, key=lambda c: c.index) or any(
            d.hostdev.address != d.address
            or (d.place is not None and d.hostdev.is_multifunction != d.place.is_multifunction)
            for d in devices
        )

    def _room(self) -> tuple[Room, tuple[Controller, ...]]:
        """What the domain leaves free, and the PCI bridge that the hook keeps at its place, with its port, if any."""
        guest = self.guest
        moved = {device.key for device in self.placed}
        foreign = [controller for controller in guest.controllers if not controller.is_own]
        own = [controller for controller in guest.controllers if controller.is_own]
        seen = forecast(guest.controllers, guest.endpoints, moved)
        kept = tuple(controller for controller in own if _is_of_pcie_0(controller))
        earlier = [controller.index for controller in own if not _is_of_pcie_0(controller)]
        taken = {controller.index for controller in foreign}
        taken |= {e.address.bus for e in guest.endpoints if e.address is not None and e.key not in moved}
        if seen.bridge_index is not None:
            # No address: libvirt gives the bridge the free root port with the lowest index, as it does without the
            # hook. That port must be in the XML: libvirt 9.0 lists those that it adds behind the bridge, and QEMU
            # then does not find the bridge's bus.
            port = next(index for index in range(1, seen.bridge_index) if index not in taken)
            models = {port: Model.ROOT_PORT, seen.bridge_index: Model.PCI_BRIDGE}
            kept = tuple(
                Controller(index=index, model=model, alias=own_alias(model, index, guest.aliases))
                for index, model in models.items()
            )
        taken |= {controller.index for controller in kept}
        start = min(earlier) if earlier else first_index(seen, taken)
        unmoved = [controller.address for controller in foreign]
        unmoved += [endpoint.address for endpoint in guest.endpoints if endpoint.key not in moved]
        seated = {controller.index for controller in foreign if controller.address is not None}
        highest_root_bridge = max(KUBEVIRT_LAST_PORT_INDEX, start - 1, seen.ports + 1, *taken)
        return (
            Room(
                first_index=start,
                taken_indexes=frozenset(taken),
                taken_root_slots=frozenset(a.slot for a in unmoved if a is not None and a.bus == 0),
                seated_ports=tuple(
                    c.address
                    for c in foreign
                    if c.model == Model.ROOT_PORT and c.address is not None and c.address.bus == 0
                ),
                # libvirt makes a root port of every index below that has no controller.
                waiting_ports=sum(index not in seated for index in range(1, start)),
                # Every index below could be a bridge on pcie.0, and each takes one bus.
                first_bus=highest_root_bridge + 1,
                windows=self._foreign_windows(foreign),
                aliases=guest.aliases,
            ),
            kept,
        )

    def _foreign_windows(self, foreign: Sequence[Controller]) -> tuple[tuple[int, int], ...]:
        """First and last bus of each expander of others; one without busNr gets its place from libvirt."""
        below = Counter(above.index for controller in foreign for above in self._chain(controller.address))
        return tuple(
            (c.bus_nr, min(MAX_BUS, c.bus_nr + below[c.index]))
            for c in foreign
            if c.model == Model.EXPANDER and c.bus_nr is not None
        )
