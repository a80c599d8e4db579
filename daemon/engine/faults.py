"""Faults of the device that outlive the operation which met them.

After an illegal access or a lost card every later call of the process fails: nothing that it holds can be trusted, and
no request can be answered. So the engine ends at once, with the cause in its log; the front starts another.
"""

import torch


class DeviceFault(Exception):
    """The device does not answer any more; only a new process may use it."""


def end_if_sticky(error: Exception, device: torch.device) -> None:
    """Raises DeviceFault where an error came of a device that is lost; returns where only the operation failed.

    An allocation that found no room is not such an error: the device answers after it.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as lost:
        raise DeviceFault(f"{device}: {str(lost).splitlines()[0]}") from error
