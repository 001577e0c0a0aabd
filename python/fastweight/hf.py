"""Hugging Face transformers with these kernels in its models: enable(), disable(), status(). flash-linear-attention need not be installed.

    import fastweight.hf
    fastweight.hf.enable()          # or HF_FASTWEIGHT=1 in the environment and `import fastweight.hf`

Models with gated delta-rule or KDA layers (qwen3_next, qwen3_5, olmo_hybrid, kimi_linear and those built on them) look two functions of their file up when they
are called; transformers chose what these are when the file was imported: FLA's, or a loop in torch. Both are replaced, in files imported before and after. What is
not served goes where it went before, and status() counts it with the reason (_serving.py). Models that call FLA through fastweight.fla need none of this.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys

from fastweight.torch import _serving, ops

# What transformers asks of "fla": the names that its files give the functions.
_NAMES = {
    "chunk_gated_delta_rule": ("torch_chunk_gated_delta_rule",),
    "fused_recurrent_gated_delta_rule": ("torch_recurrent_gated_delta_rule",),
    "chunk_kda": ("chunk_kimi_delta_attention",),
    "fused_recurrent_kda": ("recurrent_kimi_delta_attention",),
}
_CHOOSER = "use_kernel_func_from_hub_with_fallback"
# Models whose step sizes reach 2 (allow_neg_eigval of their configuration) and are given as values, so that the call does
# not say it.
_NEGATIVE = ("olmo_hybrid",)

_replaced = {}  # (module, attribute): what was there
_choosers = []  # modules that had transformers' chooser, and it


def _adapted(theirs, name, module):
    function = getattr(ops, name).__wrapped__
    known = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    extra = {"gain_bound": 2.0} if any(part in module for part in _NEGATIVE) and "gated_delta_rule" in name else {}

    @functools.wraps(theirs)
    def call(*args, **kwargs):
        ours = {key: value for key, value in kwargs.items() if key in known}  # as transformers does with FLA's
        ours.update(extra)
        return _serving.attempt(name, function, lambda: theirs(*args, **kwargs), args, ours)

    call.fastweight = name
    return call


def _replace(module):
    for name, attributes in _NAMES.items():
        for attribute in attributes:
            found = getattr(module, attribute, None)
            if inspect.isfunction(found) and not hasattr(found, "fastweight"):
                _replaced[module, attribute] = found
                setattr(module, attribute, _adapted(found, name, module.__name__))


def _chooser(theirs):
    @functools.wraps(theirs)
    def choose(func_name, package, *args, **kwargs):
        decorate = theirs(func_name, package, *args, **kwargs)
        if package != "fla" or func_name not in _NAMES:
            return decorate

        def decorator(torch_function):
            found = decorate(torch_function)
            module = sys.modules[torch_function.__module__]
            _replaced[module, torch_function.__name__] = found
            return _adapted(found, func_name, module.__name__)

        return decorator

    choose.fastweight = True
    return choose


def enable() -> Status:
    """Puts these kernels into transformers' models; returns status(). Does nothing with HF_FASTWEIGHT=0.

    Raises ImportError without transformers 5.23 or newer.

    >>> import fastweight.hf
    >>> try:
    ...     rows = fastweight.hf.enable()
    ... except ImportError:
    ...     pass
    >>> fastweight.hf.disable()
    """
    if os.environ.get("HF_FASTWEIGHT") == "0":
        return status()
    try:
        hub = importlib.import_module("transformers.integrations.hub_kernels")
        theirs = getattr(hub, _CHOOSER)
    except (ImportError, AttributeError) as error:
        raise ImportError(f"fastweight.hf.enable(): expected transformers with {_CHOOSER} (5.23 has it), got: {error}") from error
    for module in (hub, importlib.import_module("transformers.integrations")):
        if not hasattr(getattr(module, _CHOOSER), "fastweight"):
            _choosers.append((module, theirs))
            setattr(module, _CHOOSER, _chooser(theirs))
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and ".modeling_" in name and module is not None:
            _replace(module)
    return status()


def disable() -> None:
    """Restores transformers' own functions.

    >>> import fastweight.hf
    >>> fastweight.hf.disable()
    >>> fastweight.hf.status()[0]["files"]
    []
    """
    for (module, attribute), found in _replaced.items():
        setattr(module, attribute, found)
    _replaced.clear()
    for module, theirs in _choosers:
        setattr(module, _CHOOSER, theirs)
    _choosers.clear()


class Status(list):
    """What status() returns: a list of dicts, one for each function; print() makes a table of it.

    >>> import fastweight.hf
    >>> print(fastweight.hf.status())
    function                               served      not  models' files...
    """

    def __str__(self):
        lines = [f"{'function':36} {'served':>8} {'not':>8}  models' files"]
        for row in self:
            lines.append(f"{row['function']:36} {row['served']:8} {row['fell_back']:8}  {', '.join(row['files'])}")
            lines += [f"    {count} x {reason}" for reason, count in row["reasons"].items()]
        return "\n".join(lines)


def status() -> Status:
    """One row per function: "function", "files" (models whose file it replaces), "served", "fell_back" (calls passed on) and
    "reasons".

    >>> import fastweight.hf
    >>> [row["function"] for row in fastweight.hf.status()][:2]
    ['chunk_gated_delta_rule', 'fused_recurrent_gated_delta_rule']
    """
    rows = Status()
    for name, attributes in _NAMES.items():
        count = _serving.counts[name]
        files = sorted(module.__name__.rpartition(".modeling_")[2] for module, attribute in _replaced if attribute in attributes)
        rows.append({"function": name, "files": files, "served": count.served, "fell_back": count.fell_back, "reasons": dict(count.reasons)})
    return rows


__all__ = ["Status", "disable", "enable", "status"]


def __dir__() -> list[str]:
    return list(__all__)


if os.environ.get("HF_FASTWEIGHT", "0") not in ("", "0"):
    enable()
