"""pcie-numa-hook: PCIe and NUMA locality for KubeVirt virtual machines."""

__version__ = "0.1.0"
