"""Which tensors a rule takes: names(), describe(). Needs no torch.

    >>> import fastweight.rules
    >>> print(fastweight.rules.describe("kda"))
    kda
      axes     decay=channel gain=gate q_norm=l2 k_norm=l2
      inputs
        q              [B, T, H, K]         token      query
        k              [B, T, H, K]         token      key
        v              [B, T, HV, V]        token      value
        g              [B, T, H or HV, K]   token      log-decay, at most 0
        beta           [B, T, HV]           token      step size beta
        initial_state  [N, HV, K, V]        state      state before the first token; zero if absent (optional)
      outputs
        o              [B, T, HV, V]        token      output, in the dtype of q
        final_state    [N, HV, K, V]        state      state after the last token (optional)

Letters: B batch, T tokens, N sequences (B without cu_seqlens), H key heads, HV value heads (a multiple of H), K key
dimension, V value dimension. The library itself is asked for names and shapes: there is no second list here.
"""

from __future__ import annotations

import ctypes
import functools
import re
import sys
import typing

from fastweight import _library

__all__ = ["RuleInfo", "TensorInfo", "describe", "main", "names"]


def __dir__() -> list[str]:
    return list(__all__)


# Dimensions that differ from each other, so that a size in a message says which one it is.
_LETTERS = {1: "B", 3: "T", 4: "N", 5: "H", 10: "HV", 7: "K", 11: "V"}
_SIZES = {letter: size for size, letter in _LETTERS.items()}
_OFFSETS = (0, 1, 1, 2, 3)
_STATES = ("initial_state", "initial_precond", "final_state", "final_precond", "checkpoints", "precond_checkpoints")
_PARAMETERS = ("precond_center", "a_log", "dt_bias", "precond_a_log", "precond_dt_bias")
# One line for each field of fw_inputs and fw_outputs. tests/python/test_docs.py compares the names with the header's.
_MEANINGS = {
    "q": "query",
    "k": "key",
    "v": "value",
    "g": "log-decay, at most 0",
    "beta": "step size beta",
    "lambda_": "query feedback: the erase key is k + lambda q",
    "erase_key": "erase key p, in place of k",
    "erase_write": "vector along which the erased part is removed, in place of the write key",
    "erase_gate": "erase gate, multiplies the erase key",
    "write_gate": "write gate, multiplies the value",
    "read_correction": "d of the read vector q - d k",
    "precond_g": "log-decay of the preconditioner, at most 0",
    "precond_beta": "step size of the preconditioner",
    "precond_center": "center of the preconditioner's logarithm",
    "initial_state": "state before the first token; zero if absent",
    "initial_precond": "preconditioner before the first token; zero if absent",
    "a_log": "logarithm of the rate a in g = -a softplus(x + dt_bias), with the heads of g; 0 if absent",
    "dt_bias": "bias of the logits of g, with the heads of g; 0 if absent",
    "precond_a_log": "as a_log, for precond_g",
    "precond_dt_bias": "as dt_bias, for precond_g",
    "o": "output, in the dtype of q",
    "final_state": "state after the last token",
    "final_precond": "preconditioner after the last token",
    "checkpoints": "states every checkpoint_interval tokens",
    "precond_checkpoints": "preconditioners every checkpoint_interval tokens",
    "ring": "tokens that the state does not have yet (fastweight.torch.ring)",
}


class TensorInfo(typing.NamedTuple):
    """One tensor of a call.

    name: as the argument of fastweight.torch.forward (so `lambda_`), or the field of its result.
    shape: one letter a dimension, ("B", "T", "HV"); "H or HV" where both are taken.
    dtype: "token" (float32, bfloat16 or float16, each tensor on its own; float64 on the CPU), "state" (float32, or
        float64 in a call of float64; pools of states may be bfloat16) or "parameter" (as "state").
    required: whether a call without it is an error.
    meaning: one line of text.

    >>> describe("retnet").inputs[2]
    TensorInfo(name='v', shape=('B', 'T', 'HV', 'V'), dtype='token', required=True, meaning='value')
    """

    name: str
    shape: tuple[str, ...]
    dtype: str
    required: bool
    meaning: str


class RuleInfo(typing.NamedTuple):
    """What describe() returns; print() makes a table of it.

    name: the text that was asked for. text: the axes and numbers that differ from a default rule's, which is a rule text
    too. axes: every axis with its value. numbers: every number. inputs, outputs: a TensorInfo each, the required ones first.

    >>> info = describe("kaczmarz")
    >>> info.text
    'decay=scalar gain=kaczmarz q_norm=l2'
    >>> info.axes["gain"], info.numbers["gain_eps"]
    ('kaczmarz', 1e-06)
    >>> [tensor.name for tensor in info.inputs if tensor.required]
    ['q', 'k', 'v', 'g', 'beta']
    """

    name: str
    text: str
    axes: dict[str, str]
    numbers: dict[str, float]
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]

    def __str__(self) -> str:
        lines = [self.name, f"  axes     {self.text}"]
        tensors = self.inputs + self.outputs
        name_width = max(len(t.name) for t in tensors) + 2
        shape_width = max(len(_shape_text(t.shape)) for t in tensors) + 3
        for title, part in (("inputs", self.inputs), ("outputs", self.outputs)):
            lines.append(f"  {title}")
            for t in part:
                note = "" if t.required else " (optional)"
                lines.append(f"    {t.name:{name_width}}{_shape_text(t.shape):{shape_width}}{t.dtype:11}{t.meaning}{note}")
        return "\n".join(lines)


def names() -> list[str]:
    """The named rules, in the order of `fastweight rules`.

    The ablations of that list are names too and may be described and called, but are not in it.

    >>> names()[:3]
    ['linear_attention', 'retnet', 'mamba2']
    """
    return _library.rule_names()


def describe(rule: str, gates: str = "", state_v_first: bool = False) -> RuleInfo:
    """The axes of a rule, and name, shape, dtype and meaning of every tensor that a call of it takes and gives.

    rule: a name ("kda"), axes ("decay=channel gain=longhorn"), or a name with axes that differ ("kda gain_bound=2").
    gates: which gates are given as logits, as in fastweight.torch.forward; adds a_log and dt_bias where they apply.
    state_v_first: states are [N, HV, V, K].

    Raises fastweight.Error for a rule or gates that do not exist, with what was expected.

    >>> [(t.name, t.shape) for t in describe("decay=scalar gain=longhorn").inputs[3:5]]
    [('g', ('B', 'T', 'HV')), ('beta', ('B', 'T', 'HV'))]
    >>> describe("gated_deltanet", gates="g=softplus").inputs[-2].name
    'a_log'
    >>> describe("kda gain=big")
    Traceback (most recent call last):
    ...
    fastweight.Error: rule: axis gain: expected one of one, gate, kaczmarz, nlms, longhorn, efla, precond_longhorn, got 'big'
    """
    if not isinstance(rule, str):
        raise _library.Error(f"rule: expected a preset's name or axis=value ..., got {type(rule).__name__}")
    text, axes, numbers = _axes(rule)
    inputs, outputs = _tensors(rule, gates or "", bool(state_v_first))
    return RuleInfo(rule, text, dict(axes), dict(numbers), inputs, outputs)


def _shape_text(shape):
    return f"[{', '.join(shape)}]"


@functools.lru_cache(maxsize=None)
def _axes(rule):
    """Text, axes and numbers of a rule."""
    header, struct = _library.header(), _library.rule_struct(rule)
    axes, numbers = [], []
    for name, _ in struct._fields_:
        if name in ("size", "reserved"):
            continue
        value, enum = getattr(struct, name), header.field_enums.get(("fw_rule", name))
        if enum is None:
            numbers.append((name, value))
        else:
            axes.append((name, next(word for word, number in header.enums[enum].items() if number == value)))
    return _library.rule_text(struct), tuple(axes), tuple(numbers)


class _Tensor:
    """A tensor as the library has asked for it so far."""

    def __init__(self):
        self.given, self.shape, self.either = True, (), False


@functools.lru_cache(maxsize=None)
def _tensors(rule, gates, v_first):
    """(inputs, outputs) as tuples of TensorInfo.

    The library checks the tensors of a call and names the first that it refuses, with the shape that it expects. So a
    call of a few zeros is tried, and mended by what the message says, until it is accepted.
    """
    call = _Trial(rule, gates, v_first)
    call.mend()
    logits = _library.gates_struct(gates)
    found = {struct: [] for struct in ("fw_inputs", "fw_outputs")}
    for struct, field in call.fields():
        tensor = call.tensors[struct, field]
        if tensor.given:
            name = "lambda_" if field == "lambda" else field
            shape = tuple([_LETTERS[size] for size in tensor.shape])
            if tensor.either:
                shape = tuple(["H or HV" if letter == "HV" else letter for letter in shape])
            dtype = "state" if name in _STATES else "parameter" if name in _PARAMETERS else "token"
            meaning = _MEANINGS.get(name, "")
            if struct == "fw_inputs" and getattr(logits, field, 0):
                meaning = f"logit of the {meaning}"
            found[struct].append(TensorInfo(name, shape, dtype, call.requires(struct, field), meaning))
    return tuple([tuple(sorted(found[struct], key=lambda t: not t.required)) for struct in ("fw_inputs", "fw_outputs")])


class _Trial:
    def __init__(self, rule, gates, v_first):
        header, lib = _library.header(), _library.library()
        self._lib, self._f32 = lib, header.enums["fw_dtype"]["f32"]
        desc = _library.new("fw_desc")
        desc.rule, desc.gates = _library.rule_struct(rule), _library.gates_struct(gates)
        desc.dtype = self._f32
        desc.state_layout = header.enums["fw_state_layout"]["state_v_first" if v_first else "state_k_first"]
        for letter in ("B", "T", "H", "HV", "K", "V"):
            setattr(desc, letter, _SIZES[letter])
        self._offsets = (ctypes.c_int64 * len(_OFFSETS))(*_OFFSETS)
        desc.seqlens.cu_seqlens, desc.seqlens.num_sequences = ctypes.addressof(self._offsets), _SIZES["N"]
        self._desc = desc
        sizes = _library.new("fw_sizes")
        _library.check(lib.fw_workspace_query(ctypes.byref(desc), ctypes.byref(sizes)))
        # The workspace must be aligned to 64 bytes; tensors hold at most N HV K V numbers.
        self._bytes = sizes.forward
        self._space = ctypes.create_string_buffer(self._bytes + 64)
        most = 4 * _SIZES["N"] * _SIZES["HV"] * _SIZES["K"] * _SIZES["V"]
        self._zeros, self._written = ctypes.create_string_buffer(most), {}
        self.tensors = {place: _Tensor() for place in self.fields()}
        for (struct, _), tensor in self.tensors.items():
            if struct == "fw_outputs":
                self._written[id(tensor)] = ctypes.create_string_buffer(most)

    def fields(self):
        for struct in ("fw_inputs", "fw_outputs"):
            for field, _ in _library.header().structs[struct]._fields_:
                if field != "size":
                    yield struct, field

    def _try(self, without=None):
        """The library's message on a call with the tensors that are given, "" if it takes them."""
        structs = {struct: _library.new(struct) for struct in ("fw_inputs", "fw_outputs")}
        for place, tensor in self.tensors.items():
            if not tensor.given or place == without:
                continue
            field = getattr(structs[place[0]], place[1])
            field.data = ctypes.addressof(self._written.get(id(tensor), self._zeros))
            field.dtype, field.rank, stride = self._f32, len(tensor.shape), 1
            for i in reversed(range(len(tensor.shape))):
                field.shape[i], field.stride[i] = tensor.shape[i], stride
                stride *= tensor.shape[i]
        plan = ctypes.c_void_p()
        _library.check(self._lib.fw_plan_create(ctypes.byref(self._desc), 0, ctypes.byref(plan)))
        address = ctypes.addressof(self._space)
        try:
            status = self._lib.fw_plan_forward(plan, ctypes.byref(structs["fw_inputs"]), ctypes.byref(structs["fw_outputs"]), None, 0,
                                               -(-address // 64) * 64, self._bytes)
            return "" if status == 0 else self._lib.fw_last_error().decode()
        finally:
            self._lib.fw_plan_destroy(plan)

    def mend(self):
        for _ in range(4 * len(self.tensors)):
            message = self._try()
            if not message:
                return
            name, _, said = message.partition(": ")
            tensor = next((t for (_, field), t in self.tensors.items() if field == name), None)
            rank = re.match(r"rank: expected (\d)", said)
            shape = re.match(r"shape: expected \[([\d, ]+)\]( or with)?", said)
            if tensor is not None and said.startswith("expected none"):
                tensor.given = False
            elif tensor is not None and rank:
                tensor.shape = (0,) * int(rank.group(1))
            elif tensor is not None and shape:
                tensor.shape, tensor.either = tuple(map(int, shape.group(1).split(", "))), bool(shape.group(2))
            else:
                raise _library.Error(message)
        raise RuntimeError(f"fastweight.rules: the library's checks were not understood: {message}")

    def requires(self, struct, field):
        return self._try(without=(struct, field)).startswith(f"{field}: expected a tensor")


def main(arguments: list[str]) -> int:
    """`python -m fastweight.rules [RULE]`: the table of one rule, or all names; the exit code.

    >>> main(["linear_attention gain=gate"])  # doctest: +ELLIPSIS
    linear_attention gain=gate
      axes     update=additive gain=gate
      inputs
        q ...
    0
    """
    try:
        print(describe(" ".join(arguments)) if arguments else "\n".join(names()))
    except _library.Error as error:
        print(f"rules: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
