"""The shared library: where it is, its functions with their types, its errors as Python's, and rules as its struct.

Searched in this order: the file that FASTWEIGHT_LIBRARY names, beside this file (the wheel), the system's libraries. The C
header is the one of the package, or that of the source tree around it.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import os
import pathlib

from fastweight._header import Header

_HERE = pathlib.Path(__file__).resolve().parent
_SIZED = ("fw_desc", "fw_rule", "fw_inputs", "fw_outputs", "fw_sizes", "fw_short_conv", "fw_short_conv_tensors")  # the structs that begin with their size


class Error(ValueError):
    """An argument is wrong. The message names the argument, what was expected, and what was given.

    >>> import fastweight
    >>> try:
    ...     fastweight.rules.describe("kda decay=fast")
    ... except fastweight.Error as error:
    ...     print(error)
    rule: axis decay: expected one of none, constant, scalar, channel, got 'fast'
    """

    __module__ = "fastweight"


class DeviceError(RuntimeError):
    """The device cannot run the call: no GPU, one that is not supported, or a library built without CUDA.

    >>> import fastweight
    >>> try:
    ...     fastweight.check("cuda")
    ... except fastweight.DeviceError:
    ...     device = "cpu"
    ... else:
    ...     device = "cuda"
    """

    __module__ = "fastweight"


def find_library() -> str:
    """Path, or name, of the shared library that calls go to: FASTWEIGHT_LIBRARY, the wheel's, or the system's.

    Raises ImportError where there is none.

    >>> import fastweight
    >>> "fastweight" in fastweight.find_library()
    True
    """
    named = os.environ.get("FASTWEIGHT_LIBRARY")
    if named:
        if not os.path.exists(named):
            raise ImportError(f"FASTWEIGHT_LIBRARY: expected the path of libfastweight.so, got '{named}', which is not there")
        return named
    beside = _HERE / "libfastweight.so"
    if beside.exists():
        return str(beside)
    found = ctypes.util.find_library("fastweight")
    if found:
        return found
    raise ImportError(
        f"libfastweight.so: expected it at {beside} (the wheel brings it), in FASTWEIGHT_LIBRARY or among the system's libraries; "
        "build the wheel with `make wheel` and install it"
    )


@functools.lru_cache(maxsize=None)
def header():
    for path in (_HERE / "include/fastweight/fastweight.h", _HERE.parents[1] / "include/fastweight/fastweight.h"):
        if path.exists():
            return Header(path.read_text(encoding="utf-8"))
    raise ImportError(f"fastweight.h: expected it at {_HERE / 'include/fastweight'}; the installation is not whole")


@functools.lru_cache(maxsize=None)
def library():
    """The loaded library. Calls release the GIL."""
    path = find_library()
    try:
        lib = ctypes.CDLL(path)
    except OSError as e:
        raise ImportError(f"{path}: expected a library that loads: {e}") from None
    pointer, size, status = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for name, result, arguments in (
        *((f"{struct}_init_sized", None, [pointer, size]) for struct in _SIZED),
        ("fw_rule_parse", status, [ctypes.c_char_p, pointer]),
        ("fw_rule_format", size, [pointer, pointer, size]),
        ("fw_rule_preset", status, [ctypes.c_char_p, pointer]),
        ("fw_rule_name", ctypes.c_char_p, [ctypes.c_int]),
        ("fw_workspace_query", status, [pointer, pointer]),
        ("fw_device_check", status, [ctypes.c_int32]),
        ("fw_plan_text", size, [pointer, pointer, size]),
        ("fw_plan_create", status, [pointer, ctypes.c_int, pointer]),
        ("fw_plan_destroy", None, [pointer]),
        ("fw_plan_sizes", status, [pointer, pointer]),
        ("fw_plan_forward", status, [pointer, pointer, pointer, pointer, size, pointer, size]),
        ("fw_plan_backward", status, [pointer, pointer, pointer, pointer, pointer, size, pointer, size]),
        ("fw_plan_step", status, [pointer, pointer, pointer, pointer, size]),
        ("fw_short_conv_query", status, [pointer, pointer]),
        ("fw_short_conv_forward", status, [pointer, pointer, pointer, size]),
        ("fw_short_conv_backward", status, [pointer, pointer, pointer, pointer, size]),
        ("fw_short_conv_step", status, [pointer, pointer, pointer, size]),
        ("fw_last_error", ctypes.c_char_p, []),
        ("fw_version", ctypes.c_char_p, []),
        ("fw_simd_target", ctypes.c_char_p, []),
        ("fw_set_threads", None, [ctypes.c_int]),
        ("fw_get_threads", ctypes.c_int, []),
    ):
        function = getattr(lib, name, None)
        if function is None:
            raise ImportError(f"{path}: expected libfastweight of this package's version, which has {name}")
        function.restype = result
        function.argtypes = arguments
    version = lib.fw_version().decode()
    probe = new("fw_desc", lib)
    sizes = new("fw_sizes", lib)
    probe.B = probe.T = probe.H = probe.HV = probe.K = probe.V = 1
    if lib.fw_workspace_query(ctypes.byref(probe), ctypes.byref(sizes)) != 0:
        raise ImportError(f"{path} (version {version}) and the C header of this package are of different versions: {lib.fw_last_error().decode()}")
    return lib


def new(struct, lib=None):
    """A struct of the header with every field at its default."""
    value = header().structs[struct]()
    initialise(struct, ctypes.addressof(value), lib)
    return value


def initialise(struct, address, lib=None):
    """Sets the size and the defaults of the struct at that address."""
    getattr(lib or library(), f"{struct}_init_sized")(address, ctypes.sizeof(header().structs[struct]))


def check(status):
    """Raises what the status of a call says."""
    if status == 0:
        return
    statuses = header().enums["fw_status"]
    message = library().fw_last_error().decode()
    if status == statuses["error_device"]:
        raise DeviceError(message)
    if status == statuses["error_memory"]:
        raise MemoryError(message)
    raise (Error if status == statuses["error_argument"] else RuntimeError)(message)


def rule_names() -> list[str]:
    """The named rules, as fastweight.rules.names().

    >>> import fastweight
    >>> "gated_deltanet" in fastweight.rule_names()
    True
    """
    names = []
    while True:
        name = library().fw_rule_name(len(names))
        if name is None:
            return names
        names.append(name.decode())


@functools.lru_cache(maxsize=None)
def gates_struct(text):
    """Which gates are given as logits (fw_gates), written like a rule: "g=softplus beta=sigmoid", "" for none."""
    gates = new("fw_desc").gates
    values = header().enums["fw_given"]
    numbers = {name for name, kind in gates._fields_ if kind is ctypes.c_double}
    names = [name for name, _ in gates._fields_ if name != "reserved"]
    for word in text.split():
        name, equals, value = word.partition("=")
        if not equals or name not in names:
            raise Error(f"gates: expected name=value with a name of {', '.join(names)}, got '{word}'")
        if name in numbers:
            try:
                setattr(gates, name, float(value))
            except ValueError:
                raise Error(f"gates: {name}: expected a number, got '{value}'") from None
        elif value not in values:
            raise Error(f"gates: {name}: expected one of {', '.join(values)}, got '{value}'")
        else:
            setattr(gates, name, values[value])
    return gates


@functools.lru_cache(maxsize=None)
def rule_struct(text):
    """A rule as it is written everywhere: a preset's name, axis=value words, or the one followed by the others."""
    rule = new("fw_rule")
    check(library().fw_rule_parse(text.encode(), ctypes.byref(rule)))
    return rule


def rule_text(rule):
    """The axes and numbers of a rule that differ from the default rule's."""
    lib = library()
    length = lib.fw_rule_format(ctypes.byref(rule), None, 0)
    if length == 0:
        raise Error(lib.fw_last_error().decode())
    text = ctypes.create_string_buffer(length + 1)
    lib.fw_rule_format(ctypes.byref(rule), text, length + 1)
    return text.value.decode()
