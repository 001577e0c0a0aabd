"""What is served and what is not: reasons, counters, and the way back to flash-linear-attention's own functions.

A function of fastweight.torch.ops raises NotServed before it computes anything; then the function of the same name of an installed flash-linear-attention is called, or,
with FASTWEIGHT_STRICT=1 and where there is none, the reason is the caller's error.
"""

import collections
import functools
import importlib
import os
import threading

import torch

from fastweight import _library


class NotServed(NotImplementedError):
    """A call that these kernels do not take, and why.

    >>> from fastweight.torch import NotServed
    >>> issubclass(NotServed, NotImplementedError)
    True
    """


class Counts:
    def __init__(self):
        self.served = 0
        self.fell_back = 0
        self.reasons = collections.Counter()


counts = collections.defaultdict(Counts)
originals = {}  # {name: function} of what fastweight.fla has replaced


def strict():
    return os.environ.get("FASTWEIGHT_STRICT", "0") != "0"


def _asked(name):
    return os.environ.get(name, "0") != "0"


@functools.lru_cache(maxsize=None)
def _cuda_problem():
    try:
        _library.check(_library.library().fw_device_check(_library.header().enums["fw_device"]["cuda"]))
    except Exception as error:
        return str(error)
    return None


def require_keys(q, most):
    """Raises NotServed for a larger K than the rule's chunk kernels take on CUDA."""
    if q.is_cuda and q.shape[-1] > most:
        raise NotServed(f"q: K = {q.shape[-1]} on CUDA runs one token at a time, expected at most {most}")


def require(q, k, v, most_keys=128, **refused):
    """Raises NotServed for tensors that the kernels do not take or would take slowly; most_keys: as require_keys() has it; refused: {argument: value} that
    must be absent."""
    for name, value in refused.items():
        if value is not None and value is not False:
            raise NotServed(f"{name}: not served, got {value if isinstance(value, (bool, int, float, str)) else type(value).__name__}")
    if q.is_cuda:
        if _cuda_problem():
            raise NotServed(_cuda_problem())
        if q.dtype == torch.float32 and not _asked("FASTWEIGHT_FP32"):
            raise NotServed("q: float32 on CUDA runs one token at a time (FASTWEIGHT_FP32=1 asks for it)")
        if q.dtype == torch.float16 and not _asked("FASTWEIGHT_FP16"):
            raise NotServed("q: float16 on CUDA is computed with bfloat16 products (FASTWEIGHT_FP16=1 asks for it)")
        require_keys(q, most_keys)
    elif not q.is_cpu:
        raise NotServed(f"q: expected a tensor on the CPU or on CUDA, got one on {q.device}")


def original(name, module):
    """flash-linear-attention's own function, or None."""
    if name in originals:
        return originals[name]
    try:
        return getattr(importlib.import_module(f"fla.ops.{module}"), name, None)
    except ImportError:
        return None


def attempt(name, function, theirs, args, kwargs):
    """function(*args, **kwargs), or theirs() where it is not served; counts which. theirs: a function without arguments, or None."""
    counting = not torch.compiler.is_compiling()  # a counter in a compiled graph would be a guard of it
    try:
        result = function(*args, **kwargs)
    except NotServed as reason:
        if counting:
            counts[name].fell_back += 1
            counts[name].reasons[str(reason)] += 1
        if strict() or theirs is None:
            raise
    else:
        if counting:
            counts[name].served += 1
        return result
    return theirs()


def served(module):
    """Decorates a function of fastweight.torch.ops; module: where flash-linear-attention has the function of that name, below fla.ops."""

    def decorate(function):
        name = function.__name__

        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            def theirs():
                found = original(name, module)
                if found is None:
                    return function(*args, **kwargs)  # raises the reason again
                return found(*args, **kwargs)

            return attempt(name, function, theirs, args, kwargs)

        wrapper.module = module
        return wrapper

    return decorate


class _Checking(threading.local):
    on = False


_checking = _Checking()


class _Accepted(Exception):
    pass


def checking():
    return _checking.on


def accept():
    """Where a call that is only checked ends."""
    raise _Accepted


def problem(function, args, kwargs):
    """Why a call of a function of fastweight.torch.ops is not served, or None; computes nothing."""
    _checking.on = True
    try:
        function.__wrapped__(*args, **kwargs)
    except _Accepted:
        return None
    except NotServed as reason:
        return str(reason)
    finally:
        _checking.on = False
    return None
