"""fastweight: linear attention with the delta rule.

Nothing here imports torch. What is where:

    fastweight.torch       the recurrence on tensors: forward, backward, step, prefill, speculate
    fastweight.torch.ops   the same under the names and signatures of flash-linear-attention
    fastweight.torch.pools states in a pool, as servers keep them
    fastweight.rules       which tensors a rule takes
    fastweight.fla, .hf    enable() puts the kernels under flash-linear-attention, under Hugging Face transformers
    fastweight.vllm, .sglang  plugins of the servers
    fastweight.convert     model folders from and to the FLA / Hugging Face format
    python -m fastweight.doctor, .bench  a check of the installation; timings

docs/python.md is the manual.
"""

from __future__ import annotations

from fastweight import rules
from fastweight._library import DeviceError, Error, find_library, library, rule_names

__all__ = ["DeviceError", "Error", "check", "find_library", "rule_names", "rules", "set_threads", "simd_target", "version"]


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> str:
    if name == "__version__":  # the library is loaded for it
        return version()
    raise AttributeError(f"module 'fastweight' has no attribute '{name}'")


def version() -> str:
    """The version of the loaded library, "major.minor.patch".

    >>> import fastweight
    >>> len(fastweight.version().split("."))
    3
    """
    return library().fw_version().decode()


def simd_target() -> str:
    """The instruction set that calls on the CPU use on this machine.

    >>> import fastweight
    >>> isinstance(fastweight.simd_target(), str)
    True
    """
    return library().fw_simd_target().decode()


def set_threads(threads: int) -> None:
    """Sets the number of threads of later calls on the CPU; 0 restores the default (OMP_NUM_THREADS, else all cores).

    Results have the same bits with any number of threads.

    >>> import fastweight
    >>> fastweight.set_threads(1)
    >>> fastweight.set_threads(0)
    """
    library().fw_set_threads(threads)


def check(device: str = "cpu") -> None:
    """Raises DeviceError unless calls on this kind of device, "cpu" or "cuda", can run here.

    >>> import fastweight
    >>> fastweight.check("cpu")
    >>> fastweight.check("tpu")
    Traceback (most recent call last):
    ...
    fastweight.Error: device: expected one of cpu, cuda, got 'tpu'
    """
    from fastweight import _library

    devices = _library.header().enums["fw_device"]
    if device not in devices:
        raise Error(f"device: expected one of {', '.join(devices)}, got {device!r}")
    _library.check(library().fw_device_check(devices[device]))
