"""Settings of the communication library that a machine asks for, put in place before ranks meet.

The library's defaults are those of other machines: of one with NVLink, or of a single socket.
"""

from collections.abc import MutableMapping

from metainfer.hardware.machine import Machine
from metainfer.hardware.vocabulary import COMMUNICATOR, nearest
from metainfer.ir.errors import PlanError


def apply_settings(machine: Machine, environ: MutableMapping[str, str]) -> tuple[str, ...]:
    """Set what is not set; what a user set himself stays.

    Args:
        machine: that the plan was made for.
        environ: of this process; the library reads it when its first group is formed.

    Returns: a line for each setting: what holds, and why.
    Raises: PlanError for a setting that is none of the library's known ones.
    """
    notes = []
    for option in machine.communicator:
        if option.name not in COMMUNICATOR:
            raise PlanError(
                f"the plan's machine {machine.name} sets {option.name}, which is not known",
                advice=nearest(option.name, list(COMMUNICATOR)),
            )
        held = environ.setdefault(option.name, option.value)
        if held == option.value:
            notes.append(f"{option.name}={held}: {option.reason}")
        else:
            notes.append(
                f"{option.name}={held} stays as it was set; {machine.name} asks for "
                f"{option.value}: {option.reason}"
            )
    return tuple(notes)
