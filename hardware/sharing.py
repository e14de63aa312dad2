"""What a computation and a collective cost each other where they run at once on a device.

Nobody measured these on the cards of our files; each figure says so.
"""

from metainfer.hardware.device import Device
from metainfer.ir.timeline import Sharing

# A collective's kernels hold some of the multiprocessors and a part of the memory's rate.
_GPU = Sharing(
    computing=0.9, meeting=0.95, wait_seconds=1.5e-6,
    source="assumed: 16 channels of a communication library on 140 to 190 multiprocessors",
)  # fmt: skip
# The cores that move bytes are those that compute.
_CPU = Sharing(
    computing=0.5, meeting=0.5, wait_seconds=0.0,
    source="measured over gloo: 67 ms and 67 ms take 125 ms together",
)  # fmt: skip


def sharing_of(device: Device) -> Sharing:
    """How ops that run at once share a device."""
    return _GPU if device.kind == "gpu" else _CPU
