"""flash-linear-attention (FLA) with these kernels under it: enable(), disable(), status().

    import fastweight.fla
    fastweight.fla.enable()          # or FLA_FASTWEIGHT=1 in the environment and `import fastweight.fla`

FLA's layers and models, and Hugging Face's that call its functions, stay as they are, imported before or after. Where FLA (0.6) has a registry of
backends for a whole operation, this is one of them, before the others; elsewhere the names that FLA's functions look up when they are called are
replaced: an autograd Function's class by an object with the same apply, or an inner function. What is not served goes on as if nothing had been replaced,
and status() counts it with the reason.
"""

from __future__ import annotations

import importlib
import inspect
import os

from fastweight.torch import _serving, ops

_BACKEND = "fastweight"

# (module below fla.ops, name looked up at call time, function of ops)
_GLOBALS = (
    ("gated_delta_rule.chunk", "ChunkGatedDeltaRuleFunction", "chunk_gated_delta_rule"),
    ("gated_delta_rule.fused_recurrent", "FusedRecurrentFunction", "fused_recurrent_gated_delta_rule"),
    ("kda.chunk", "ChunkKDAFunction", "chunk_kda"),
    ("kda.fused_recurrent", "fused_recurrent_kda_fwd", "fused_recurrent_kda"),
    ("delta_rule.chunk", "ChunkDeltaRuleFunction", "chunk_delta_rule"),
    ("delta_rule.fused_recurrent", "FusedRecurrentFunction", "fused_recurrent_delta_rule"),
    ("gdn2.chunk", "ChunkGDN2Function", "chunk_gdn2"),
    ("gdn2.fused_recurrent", "fused_recurrent_gdn2_fwd", "fused_recurrent_gdn2"),
    ("gla.chunk", "ChunkGLAFunction", "chunk_gla"),
    ("gla.fused_recurrent", "fused_recurrent", "fused_recurrent_gla"),
    ("simple_gla.chunk", "ChunkSimpleGLAFunction", "chunk_simple_gla"),  # retention, linear and lightning attention too
    ("simple_gla.fused_recurrent", "fused_recurrent", "fused_recurrent_simple_gla"),
    ("comba.chunk", "ChunkCombaFunction", "chunk_comba"),
    ("comba.fused_recurrent", "FusedRecurrentCombaFunction", "fused_recurrent_comba"),
    ("precond_gated_delta_rule.chunk", "ChunkPrecondGatedDeltaRuleFunction", "chunk_precond_gated_delta_rule"),
    ("precond_gated_delta_rule.fused_recurrent", "FusedRecurrentPrecondGatedDeltaRuleFunction", "fused_recurrent_precond_gated_delta_rule"),
    ("precond_kda.chunk", "ChunkPrecondKDAFunction", "chunk_precond_kda"),
    ("precond_kda.fused_recurrent", "fused_recurrent_precond_kda_fwd", "fused_recurrent_precond_kda"),
)
# Whole operations that FLA 0.6 dispatches: function of ops: (module, the registry's name or None: the function has one of its own)
_DISPATCHED = {"chunk_gated_delta_rule": ("gated_delta_rule.chunk", "gated_delta_rule"), "chunk_kda": ("kda.chunk", None)}

_replaced = {}  # (module, name): what was there
_how = {}  # function of ops: "registry", "module", or why it is not there


def _adapted(theirs, forward, name):
    """A function with the arguments of an inner function of FLA that calls ours of that name, or theirs."""
    function = getattr(ops, name).__wrapped__
    ours = inspect.signature(function).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in ours.values())
    signature = inspect.signature(forward)

    def call(*args, **kwargs):
        given = dict(signature.bind(*args, **kwargs).arguments)
        given.update(given.pop("kwargs", {}))
        if "use_gate_in_kernel" in ours and "use_gate_in_kernel" not in signature.parameters:
            given["use_gate_in_kernel"] = given.get("A_log") is not None
        extra = [key for key in given if key not in ours and not open_ended]

        def run(**given):
            for key in extra:
                value = given.pop(key)
                if value is not None and value is not False:
                    raise _serving.NotServed(f"{key}: not served")
            return function(**given)

        return _serving.attempt(name, run, lambda: theirs(*args, **kwargs), (), given)

    return call


class _Replacement:
    """Stands where FLA has an autograd Function; everything but apply is the Function's own."""

    def __init__(self, function_class, name):
        parameters = list(inspect.signature(function_class.forward).parameters.values())[1:]

        def forward(*args):  # bound by the names of its arguments, without ctx
            raise NotImplementedError

        forward.__signature__ = inspect.Signature(parameters)
        self._class = function_class
        self.apply = _adapted(function_class.apply, forward, name)

    def __getattr__(self, attribute):
        return getattr(self._class, attribute)


def _replace(module_name, attribute, name):
    try:
        module = importlib.import_module(f"fla.ops.{module_name}")
    except ImportError as error:
        return f"not in this flash-linear-attention ({error})"
    found = getattr(module, attribute, None)
    if found is None:
        return f"fla.ops.{module_name} has no {attribute}"
    if (module_name, attribute) not in _replaced:
        _replaced[module_name, attribute] = found
        setattr(module, attribute, _Replacement(found, name) if inspect.isclass(found) else _adapted(found, inspect.unwrap(found), name))
    return "module"


def _register(name):
    """Puts a backend before FLA's own; False where this FLA has no such registry."""
    try:
        backends = importlib.import_module("fla.backends")
        module = importlib.import_module(f"fla.ops.{_DISPATCHED[name][0]}")
        target = _DISPATCHED[name][1] or getattr(module, name)
        function = getattr(ops, name)
        plain = inspect.unwrap(getattr(module, name))

        def verify(self, *args, **kwargs):
            reason = _serving.problem(function, args, kwargs)
            if reason is not None:
                _serving.counts[name].fell_back += 1
                _serving.counts[name].reasons[reason] += 1
                if _serving.strict():
                    raise _serving.NotServed(reason)
            return reason is None, reason

        def call(self, *args, **kwargs):
            return _serving.attempt(name, function.__wrapped__, lambda: plain(*args, **kwargs), args, kwargs)

        body = {"backend_type": _BACKEND, "priority": 1, "env_var": "FLA_FASTWEIGHT", name: call, f"{name}_verifier": verify}
        backends.register(target)(type("FastweightBackend", (backends.BaseBackend,), body))
    except (ImportError, AttributeError, KeyError):
        return False
    return True


def enable() -> Status:
    """Puts these kernels under the installed flash-linear-attention; returns status(). Does nothing with FLA_FASTWEIGHT=0.

    Raises ImportError where flash-linear-attention is not installed.

    >>> import fastweight.fla
    >>> rows = fastweight.fla.enable()
    >>> {row["by"] for row in rows} <= {"registry", "module"}
    True
    >>> fastweight.fla.disable()
    """
    if os.environ.get("FLA_FASTWEIGHT") == "0":
        return status()
    try:
        importlib.import_module("fla.ops")
    except ImportError as error:
        raise ImportError(f"fastweight.fla.enable(): expected an installed flash-linear-attention, got: {error}") from error
    for module, attribute, name in _GLOBALS:
        # With dispatch switched off by FLA's own variable the registry fires no more, and the module's names do.
        if name in _DISPATCHED and os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") != "1" and _register(name):
            _how[name] = "registry"
        else:
            _how[name] = _replace(module, attribute, name)
    return status()


def disable() -> None:
    """Restores flash-linear-attention's own functions.

    >>> import fastweight.fla
    >>> fastweight.fla.disable()
    >>> {row["by"] for row in fastweight.fla.status()}
    {'off'}
    """
    for (module, attribute), found in _replaced.items():
        setattr(importlib.import_module(f"fla.ops.{module}"), attribute, found)
    _replaced.clear()
    for name, how in _how.items():
        if how == "registry":
            backends = importlib.import_module("fla.backends")
            module, operation = _DISPATCHED[name]
            entry = inspect.unwrap(getattr(importlib.import_module(f"fla.ops.{module}"), name))
            registry = backends._operation_registries[operation] if operation else backends._function_registries[entry]
            registry._backends.pop(_BACKEND, None)
    _how.clear()


class Status(list):
    """What status() returns: a list of dicts, one for each function; print() makes a table of it.

    >>> import fastweight.fla
    >>> print(fastweight.fla.status())
    function                                     by           served      not...
    """

    def __str__(self):
        lines = [f"{'function':44} {'by':10} {'served':>8} {'not':>8}"]
        for row in self:
            lines.append(f"{row['function']:44} {row['by']:10} {row['served']:8} {row['fell_back']:8}")
            lines += [f"    {count} x {reason}" for reason, count in row["reasons"].items()]
        return "\n".join(lines)


def status() -> Status:
    """One row per function: "function", "by" (registry, module, off, or why it cannot be replaced), "served", "fell_back"
    (calls passed on to FLA) and "reasons".

    >>> import fastweight.fla
    >>> sorted(fastweight.fla.status()[0])
    ['by', 'fell_back', 'function', 'reasons', 'served']
    """
    rows = Status()
    for _, _, name in _GLOBALS:
        count = _serving.counts[name]
        rows.append({"function": name, "by": _how.get(name, "off"), "served": count.served, "fell_back": count.fell_back, "reasons": dict(count.reasons)})
    return rows


__all__ = ["Status", "disable", "enable", "status"]


def __dir__() -> list[str]:
    return list(__all__)


if os.environ.get("FLA_FASTWEIGHT", "0") not in ("", "0"):
    enable()
