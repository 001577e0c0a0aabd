"""Hugging Face transformers with these kernels in its models: enable(), disable(), status(). Neither flash-linear-attention nor causal-conv1d need be installed.

    import fastweight.hf
    fastweight.hf.enable()          # or HF_FASTWEIGHT=1 in the environment and `import fastweight.hf`

Models with gated delta-rule or KDA layers (qwen3_next, qwen3_5, olmo_hybrid, kimi_linear and those built on them) look the functions of recurrence and
convolution in their file up when they are called; transformers chose what these are when the file was imported: FLA's and causal-conv1d's, or torch. They are
replaced, in files imported before and after. What is not served goes where it went before, and status() counts it with the reason (_serving.py). Models that call
FLA through fastweight.fla need none of this.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys

from fastweight.torch import _serving, nn, ops

# What transformers asks of "fla" and "causal_conv1d": the names that its files give the functions.
_PACKAGES = ("fla", "causal_conv1d")
_NAMES = {
    "chunk_gated_delta_rule": ("torch_chunk_gated_delta_rule",),
    "fused_recurrent_gated_delta_rule": ("torch_recurrent_gated_delta_rule",),
    "chunk_kda": ("chunk_kimi_delta_attention",),
    "fused_recurrent_kda": ("recurrent_kimi_delta_attention",),
    "causal_conv1d_fn": ("causal_conv1d_fn",),
}
_CHOOSER = "use_kernel_func_from_hub_with_fallback"
# Models whose step sizes reach 2 (allow_neg_eigval of their configuration) and are given as values, so that the call does
# not say it.
_NEGATIVE = ("olmo_hybrid",)

_replaced = {}  # (module, attribute): what was there
_choosers = []  # modules that had transformers' chooser, and it


def _causal_conv1d_fn(
    x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, final_states_out=None, activation=None, cu_seqlens=None
):
    """causal-conv1d's function of this name, as transformers calls it: x [B, D, T], weight [D, W], cu_seqlens [N + 1] of packed sequences beside seq_idx."""
    if activation not in ("silu", "swish"):
        raise _serving.NotServed(f"activation: expected 'silu', got {activation!r}")
    if seq_idx is not None and cu_seqlens is None:
        raise _serving.NotServed("seq_idx: not served without cu_seq_lens_q")
    for name, value in (("initial_states", initial_states), ("return_final_states", return_final_states or None), ("final_states_out", final_states_out)):
        if value is not None:
            raise _serving.NotServed(f"{name}: not served, got {type(value).__name__}")
    if weight.shape[-1] > 8 and x.is_cuda:
        raise _serving.NotServed(f"weight: W = {weight.shape[-1]} on CUDA, expected at most 8")
    if not (x.is_cuda or x.is_cpu):
        raise _serving.NotServed(f"x: expected a tensor on the CPU or on CUDA, got one on {x.device}")
    return nn.short_conv(x.transpose(1, 2), weight, bias, cu_seqlens=cu_seqlens)[0].transpose(1, 2)


def _adapted(theirs, name, module):
    function = _causal_conv1d_fn if name == "causal_conv1d_fn" else getattr(ops, name).__wrapped__
    known = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    extra = {"gain_bound": 2.0} if any(part in module for part in _NEGATIVE) and "gated_delta_rule" in name else {}

    @functools.wraps(theirs)
    def call(*args, **kwargs):
        ours = {key: value for key, value in kwargs.items() if key in known}  # as transformers does with FLA's
        ours.update(extra)
        if ours.get("cu_seqlens") is None and kwargs.get("cu_seq_lens_q") is not None:  # transformers' name, which kimi_linear passes on as it is
            ours["cu_seqlens"] = kwargs["cu_seq_lens_q"]
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
        if package not in _PACKAGES or func_name not in _NAMES:
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
