"""fastweight: delta-rule linear attention. fastweight.torch has it for PyTorch, fastweight.torch.ops under the names of
flash-linear-attention, fastweight.fla.enable() puts it under an installed flash-linear-attention.

Nothing here imports torch: that is what fastweight.torch does.
"""

from fastweight._library import DeviceError, Error, find_library, library, rule_names

__all__ = ["DeviceError", "Error", "check", "find_library", "rule_names", "set_threads", "simd_target", "version"]


def version():
    """The library's version, "0.1.0"."""
    return library().fw_version().decode()


def simd_target():
    """The instruction set that calls on the CPU use here."""
    return library().fw_simd_target().decode()


def set_threads(threads):
    """Threads of calls on the CPU; 0: the default (all cores). Results do not depend on it."""
    library().fw_set_threads(threads)


def check(device="cpu"):
    """Raises DeviceError unless calls on this kind of device ("cpu", "cuda") can run here."""
    from fastweight import _library

    devices = _library.header().enums["fw_device"]
    if device not in devices:
        raise Error(f"device: expected one of {', '.join(devices)}, got {device!r}")
    _library.check(library().fw_device_check(devices[device]))
