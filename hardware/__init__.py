"""Machines as data: schema, units, topology, and the descriptions themselves."""

from metainfer.hardware.device import Bandwidth, Curve, Device, Library, Policy, Rate
from metainfer.hardware.load import (
    known_devices,
    known_machines,
    load_device,
    load_machine,
)
from metainfer.hardware.machine import (
    Collective,
    CommunicatorOption,
    DeviceInstance,
    HostPath,
    Link,
    Machine,
    Nic,
    Node,
    Root,
    Socket,
    Switch,
    WriteCollapse,
    matches,
)
from metainfer.hardware.topology import Flow, Path, Topology

__all__ = [
    "Bandwidth",
    "Collective",
    "CommunicatorOption",
    "Curve",
    "Device",
    "DeviceInstance",
    "Flow",
    "HostPath",
    "Library",
    "Link",
    "Machine",
    "Nic",
    "Node",
    "Path",
    "Policy",
    "Rate",
    "Root",
    "Socket",
    "Switch",
    "Topology",
    "WriteCollapse",
    "known_devices",
    "known_machines",
    "load_device",
    "load_machine",
    "matches",
]
