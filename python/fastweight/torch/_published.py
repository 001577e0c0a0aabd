"""Layers that are no rule's with the family's projections: Mamba, Longhorn, Mamba-2, Mamba-3, Mesa and RWKV-7. fastweight.torch.nn has them.

Their recurrences are calls of the library, on the CPU and CUDA, as rules over other tensors; what is around them, and Mesa's solve, are PyTorch operations.
Names, shapes and initial values of parameters are the engine's (src/nn/*_params.cpp), and so the authors' or flash-linear-attention's.
"""

from __future__ import annotations

import math
import typing

import torch
import torch.nn.functional as F
from torch import nn

from fastweight._library import Error
from fastweight.torch import _layer, forward
from fastweight.torch.nn import LayerState, _Weight, short_conv

_ROWS = "mamba2 write=scalar"
_CHUNK = 64  # tokens of which Mesa computes the sums at once


def _exact(x):
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _rms(x, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _offsets(x, cu_seqlens):
    return cu_seqlens.to(device=x.device, dtype=torch.int64)


def _sequence(token, offsets):
    """Which of the packed sequences every token belongs to."""
    return torch.bucketize(token, offsets[1:], right=True).clamp(max=offsets.shape[0] - 2)


def _previous(x, begin, cu_seqlens):
    """What stands before every token of its sequence: x [B, T, ...], begin [N, ...] before the first, zeros if None."""
    if cu_seqlens is None:
        first = torch.zeros_like(x[:, :1]) if begin is None else begin[:, None].to(x.dtype)
        return torch.cat([first, x[:, :-1]], 1)
    offsets = _offsets(x, cu_seqlens)
    token = torch.arange(x.shape[1], device=x.device)
    n = _sequence(token, offsets)
    first = torch.zeros_like(x) if begin is None else begin.to(x.dtype).index_select(0, n)[None]
    is_first = (token == offsets.index_select(0, n)).view(1, -1, *[1] * (x.dim() - 2))
    return torch.where(is_first, first, torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1))


def _last(x, begin, cu_seqlens):
    """[N, ...]: the last token of every sequence, begin (zeros if None) of those without one."""
    if cu_seqlens is None:
        return x[:, -1]
    offsets = _offsets(x, cu_seqlens)
    last = x[0].index_select(0, (offsets[1:] - 1).clamp(min=0))
    some = (offsets.diff() > 0).view(-1, *[1] * (last.dim() - 1))
    return torch.where(some, last, torch.zeros_like(last) if begin is None else begin.to(last.dtype))


def _summed(x, begin, cu_seqlens):
    """Sums of x [B, T, ...] over a sequence up to each token, from begin [N, ...] on."""
    whole = x.cumsum(1)
    if cu_seqlens is None:
        return whole if begin is None else whole + begin[:, None]
    offsets = _offsets(x, cu_seqlens)
    before = torch.cat([torch.zeros_like(whole[0, :1]), whole[0]], 0).index_select(0, offsets[:-1])
    n = _sequence(torch.arange(x.shape[1], device=x.device), offsets)
    base = -before if begin is None else begin - before
    return whole + base.index_select(0, n)[None]


class _SequenceLayer(nn.Module):
    """What these layers have in common. A layer says its state's shapes, forward() and initial values."""

    hidden: int
    init: str

    def reset_parameters(self) -> None:
        """Draws initial values by the engine's distributions (not its random numbers)."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if not parameter.is_meta:
                    self.draw(name, parameter)

    def draw(self, name, p):
        if name == "dt_bias":
            _draw_step(p)
        elif name == "conv1d.weight" or name == "conv1d.bias":
            p.uniform_(-(self.conv_size**-0.5), self.conv_size**-0.5)
        elif name.endswith(("_proj.weight", "proj.weight")):
            _layer.projection(self.init, p, p.shape[1])
        elif name.endswith("bias"):
            p.zero_()
        else:
            p.fill_(1.0)

    def check(self, x):
        if x.dim() != 3 or x.shape[-1] != self.hidden:
            raise Error(f"hidden_states: expected [B, T, {self.hidden}], got shape {list(x.shape)}")

    def _zeros(self, device, dtype):
        device = device or next(self.parameters()).device
        return lambda *shape, kind=dtype: torch.zeros(shape, dtype=kind, device=device)

    def step(self, hidden_states: torch.Tensor, state, **options):
        """y [N, hidden_size] of one token of each sequence, hidden_states [N, hidden_size]; state is updated in place. No gradients."""
        if hidden_states.dim() != 2 or hidden_states.shape[-1] != self.hidden:
            raise Error(f"hidden_states: expected [N, {self.hidden}], got shape {list(hidden_states.shape)}")
        with torch.no_grad():
            *results, new = self(hidden_states[:, None], state, output_state=True, **{name: None if t is None else t[:, None] for name, t in options.items()})
            for old, now in zip(state, new):
                if old is not None:
                    old.copy_(now)
        results = [t[:, 0] for t in results]
        return results[0] if len(results) == 1 else tuple(results)

    @staticmethod
    def _tokens(x, state, cu_seqlens):
        lengths = _layer.lengths(x, cu_seqlens)
        return lengths if state is None else state.tokens + lengths


def _draw_step(p):
    dt = p.uniform_(math.log(1e-3), math.log(0.1)).exp().clamp(min=1e-4)
    p.copy_(dt + torch.log(-torch.expm1(-dt)))


def _whole(**values):
    for name, (value, least) in values.items():
        if not isinstance(value, int) or value < least:
            raise Error(f"{name}: expected a whole number from {least}, got {value!r}")


class _ConvLayer(_SequenceLayer):
    """Of layers with one convolution over the first parts of a projection."""

    def _convolved(self, x, state, cu_seqlens, max_seqlen, output_state):
        return short_conv(x, self.conv1d.weight, self.conv1d.bias, None if state is None else state.conv, output_final_state=output_state, cu_seqlens=cu_seqlens,
                          max_seqlen=max_seqlen)

    def _state(self, x, recurrent, conv, state, cu_seqlens):
        return LayerState(recurrent, conv.to(recurrent.dtype) if self.conv_size > 1 else None, None, self._tokens(x, state, cu_seqlens))


class _Conv(nn.Module):
    def __init__(self, channels, size, **factory):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(channels, 1, size, **factory)), nn.Parameter(torch.empty(channels, **factory))


class Mamba(_ConvLayer):
    """Mamba's layer (Gu and Dao 2023): a decay for every element of the state. docs/rules/mamba.md has the mathematics.

    expand: width inside the layer over hidden_size. state_size: numbers of state of a channel. dt_rank: rank of the time step's projection; 0: hidden_size / 16.
    conv_size: width of the convolution. init: "xavier", "normal" or "torch". The library runs the scan as the rule gla with a head for each channel.

    >>> layer = Mamba(32)
    >>> y, state = layer(torch.randn(1, 5, 32), output_state=True)
    >>> y.shape, state.recurrent.shape, state.conv.shape
    (torch.Size([1, 5, 32]), torch.Size([1, 64, 16, 1]), torch.Size([1, 3, 64]))
    """

    _step = "dt_proj"

    def __init__(self, hidden_size, *, expand=2, state_size=16, dt_rank=0, conv_size=4, init="xavier", device=None, dtype=None):
        super().__init__()
        _whole(hidden_size=(hidden_size, 1), expand=(expand, 1), state_size=(state_size, 1), dt_rank=(dt_rank, 0), conv_size=(conv_size, 1))
        factory = {"device": device, "dtype": dtype}
        self.hidden, self.inner, self.state_size, self.conv_size, self.init = hidden_size, expand * hidden_size, state_size, conv_size, init
        self.rank = dt_rank or -(-hidden_size // 16)
        if self._step == "dt_proj":
            self.A_log = nn.Parameter(torch.empty(self.inner, state_size, **factory))
        self.D = nn.Parameter(torch.empty(self.inner, **factory))
        self.in_proj = nn.Linear(hidden_size, 2 * self.inner, bias=False, **factory)
        self.conv1d = _Conv(self.inner, conv_size, **factory)
        self.x_proj = nn.Linear(self.inner, self.rank + 2 * state_size, bias=False, **factory)
        self.add_module(self._step, nn.Linear(self.rank, self.inner, **factory))
        self.out_proj = nn.Linear(self.inner, hidden_size, bias=False, **factory)
        self.reset_parameters()

    def draw(self, name, p):
        if name == "A_log":
            p.copy_(torch.arange(1, self.state_size + 1, dtype=torch.float64).log().expand_as(p))
        elif name == "dt_proj.bias":
            _draw_step(p)
        elif name == f"{self._step}.weight":
            p.uniform_(-(self.rank**-0.5), self.rank**-0.5)
        else:
            super().draw(name, p)

    def new_state(self, sequences: int, device=None, dtype: torch.dtype = torch.float32) -> LayerState:
        """The state of sequences that have not begun: zeros. dtype: float32 or float64."""
        zeros = self._zeros(device, dtype)
        return LayerState(zeros(sequences, self.inner, self.state_size, 1), zeros(sequences, self.conv_size - 1, self.inner) if self.conv_size > 1 else None, None,
                          zeros(sequences, kind=torch.int64))

    def forward(self, hidden_states, state=None, *, cu_seqlens=None, max_seqlen=None, output_state=False):
        """y [B, T, hidden_size]; with output_state (y, LayerState). The arguments are those of DeltaRuleLayer.forward()."""
        x = hidden_states
        self.check(x)
        exact = _exact(x)
        inner, z = self.in_proj(x).chunk(2, -1)
        u, conv = self._convolved(inner, state, cu_seqlens, max_seqlen, output_state)
        low, k, q = self.x_proj(u).split([self.rank, self.state_size, self.state_size], -1)
        step, log_decay, k = self._law(getattr(self, self._step)(low).to(exact), k.to(exact))
        heads = lambda t: t[:, :, None].expand(*t.shape[:2], self.inner, self.state_size)  # noqa: E731
        o, recurrent, _ = forward("gla", heads(q.to(exact)).contiguous(), heads(k).contiguous(), (step * u.to(exact))[..., None], g=log_decay, scale=1.0,
                                  initial_state=None if state is None else state.recurrent, output_final_state=output_state, cu_seqlens=cu_seqlens,
                                  max_seqlen=max_seqlen)
        y = (o[..., 0] + self.D.to(exact) * u.to(exact)) * F.silu(z.to(exact))
        y = self.out_proj(y.to(x.dtype))
        return (y, self._state(x, recurrent, conv, state, cu_seqlens)) if output_state else y

    def _law(self, logits, k):
        """The step [B, T, D], the log-decays [B, T, D, N], and k."""
        step = F.softplus(logits)
        return step, -step[..., None] * self.A_log.to(step.dtype).exp(), k


class LonghornDiag(Mamba):
    """Longhorn as it was published (Liu et al. 2024), in Mamba's layer: the diagonal of its step on the state. docs/rules/mamba.md.

    >>> LonghornDiag(32)(torch.randn(1, 5, 32)).shape
    torch.Size([1, 5, 32])
    """

    _step = "dt_head"

    def _law(self, logits, k):
        s = torch.sigmoid(logits)
        step = s / (1 + s * k.square().sum(-1, keepdim=True))
        return step, torch.log1p(-step[..., None] * k.square()[:, :, None]), k


class Mamba2(_ConvLayer):
    """Mamba-2's own layer (Dao and Gu 2024); the engine calls it ssd. docs/rules/mamba2.md has the mathematics.

    expand: width inside the layer over hidden_size. head_dim: of a head's values. state_size: K. num_groups: of heads that share B and C.

    >>> layer = Mamba2(32, head_dim=16, state_size=8)
    >>> y, state = layer(torch.randn(1, 5, 32), output_state=True)
    >>> y.shape, state.recurrent.shape
    (torch.Size([1, 5, 32]), torch.Size([1, 4, 8, 16]))
    """

    def __init__(self, hidden_size, *, expand=2, head_dim=64, state_size=128, num_groups=1, conv_size=4, norm_eps=1e-5, init="xavier", device=None, dtype=None):
        super().__init__()
        _whole(hidden_size=(hidden_size, 1), expand=(expand, 1), head_dim=(head_dim, 1), state_size=(state_size, 1), num_groups=(num_groups, 1),
               conv_size=(conv_size, 1))
        factory = {"device": device, "dtype": dtype}
        self.hidden, self.inner, self.head_dim, self.conv_size, self.init = hidden_size, expand * hidden_size, head_dim, conv_size, init
        self.heads, self.groups, self.state_size, self.norm_eps = _heads(self.inner, head_dim, num_groups), num_groups, state_size, norm_eps
        self.channels = self.inner + 2 * num_groups * state_size
        for name in ("A_log", "D", "dt_bias"):
            self.register_parameter(name, nn.Parameter(torch.empty(self.heads, **factory)))
        self.in_proj = nn.Linear(hidden_size, self.inner + self.channels + self.heads, bias=False, **factory)
        self.conv1d, self.norm = _Conv(self.channels, conv_size, **factory), _Weight(self.inner, **factory)
        self.out_proj = nn.Linear(self.inner, hidden_size, bias=False, **factory)
        self.reset_parameters()

    def draw(self, name, p):
        if name == "A_log":
            p.uniform_(1.0, 16.0).log_()
        else:
            super().draw(name, p)

    def new_state(self, sequences: int, device=None, dtype: torch.dtype = torch.float32) -> LayerState:
        """The state of sequences that have not begun: zeros. dtype: float32 or float64."""
        zeros = self._zeros(device, dtype)
        return LayerState(zeros(sequences, self.heads, self.state_size, self.head_dim),
                          zeros(sequences, self.conv_size - 1, self.channels) if self.conv_size > 1 else None, None, zeros(sequences, kind=torch.int64))

    def forward(self, hidden_states, state=None, *, cu_seqlens=None, max_seqlen=None, output_state=False):
        """y [B, T, hidden_size]; with output_state (y, LayerState). The arguments are those of DeltaRuleLayer.forward()."""
        x = hidden_states
        self.check(x)
        exact = _exact(x)
        z, xbc, dt = self.in_proj(x).split([self.inner, self.channels, self.heads], -1)
        xbc, conv = self._convolved(xbc, state, cu_seqlens, max_seqlen, output_state)
        v, k, q = xbc.split([self.inner, self.groups * self.state_size, self.groups * self.state_size], -1)
        v, k, q = v.unflatten(-1, (self.heads, -1)), k.unflatten(-1, (self.groups, -1)), q.unflatten(-1, (self.groups, -1))
        dt = F.softplus(dt.to(exact) + self.dt_bias.to(exact))
        o, recurrent, _ = forward(_ROWS, q, k, v, g=-self.A_log.to(exact).exp() * dt, write_gate=dt, scale=1.0,
                                  initial_state=None if state is None else state.recurrent, output_final_state=output_state, cu_seqlens=cu_seqlens,
                                  max_seqlen=max_seqlen)
        y = (o.to(exact) + self.D.to(exact)[:, None] * v.to(exact)).flatten(2) * F.silu(z.to(exact))
        y = _rms(y.unflatten(-1, (self.groups, -1)), self.norm_eps).flatten(2) * self.norm.weight.to(exact)
        y = self.out_proj(y.to(x.dtype))
        return (y, self._state(x, recurrent, conv, state, cu_seqlens)) if output_state else y


def _heads(inner, head_dim, groups):
    heads = inner // head_dim
    if heads * head_dim != inner or heads < 1:
        raise Error(f"head_dim: expected a divisor of expand * hidden_size = {inner}, got {head_dim}")
    if heads % groups:
        raise Error(f"num_groups: expected a divisor of the {heads} heads, got {groups}")
    return heads


class Mamba3State(typing.NamedTuple):
    """What a layer of Mamba-3 remembers between calls, of N sequences.

    recurrent: [N, H, state_size, head_dim]. k, v: of the last token, [N, R, H, state_size], rotated, and [N, R, H, head_dim]. angle: float64 [N, H, angles],
    in radians. tokens: int64 [N], tokens seen so far.

    >>> Mamba3(32, head_dim=16, state_size=8).new_state(2).k.shape
    torch.Size([2, 1, 4, 8])
    """

    recurrent: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    angle: torch.Tensor
    tokens: torch.Tensor


class Mamba3(_SequenceLayer):
    """Mamba-3's layer (Lahoti et al. 2026), SISO or with mimo_rank rows MIMO. docs/rules/mamba3.md has the mathematics.

    expand: width inside the layer over hidden_size. head_dim: of a head's values. state_size: N. num_groups: of heads that share B and C.
    rope_fraction: share of the channels of N that are rotated. rotation: "pairs", "halves" or "auto" (halves with MIMO).
    decay_activation: "softplus" or "heavy_tail". decay_floor: least rate of decay. output_norm: an RMSNorm of every head.

    A token is 3 R - 1 rows of the library's scan: those of the token before, its own, and reads.

    >>> Mamba3(32, head_dim=16, state_size=8, mimo_rank=2)(torch.randn(1, 5, 32)).shape
    torch.Size([1, 5, 32])
    """

    def __init__(self, hidden_size, *, expand=2, head_dim=64, state_size=128, num_groups=1, mimo_rank=0, rope_fraction=0.5, rotation="auto",
                 decay_activation="softplus", decay_floor=1e-4, output_norm=False, norm_eps=1e-5, init="xavier", device=None, dtype=None):
        super().__init__()
        _whole(hidden_size=(hidden_size, 1), expand=(expand, 1), head_dim=(head_dim, 1), state_size=(state_size, 1), num_groups=(num_groups, 1),
               mimo_rank=(mimo_rank, 0))
        for name, value, words in (("rotation", rotation, ("auto", "pairs", "halves")), ("decay_activation", decay_activation, ("softplus", "heavy_tail"))):
            if value not in words:
                raise Error(f"{name}: expected one of {', '.join(words)}, got {value!r}")
        factory = {"device": device, "dtype": dtype}
        self.hidden, self.inner, self.head_dim, self.state_size, self.init = hidden_size, expand * hidden_size, head_dim, state_size, init
        self.heads, self.groups, self.rows, self.mimo = _heads(self.inner, head_dim, num_groups), num_groups, mimo_rank or 1, mimo_rank > 0
        self.angles = int(state_size * rope_fraction) // 2
        if self.angles < 1 or rope_fraction > 1:
            raise Error(f"rope_fraction: expected 2 / state_size = {2 / state_size:g} to 1, got {rope_fraction}")
        self.halves = rotation == "halves" or rotation == "auto" and self.mimo
        if self.halves and state_size % 2:
            raise Error(f"state_size: expected an even number with rotation of halves, got {state_size}")
        self.heavy_tail, self.floor, self.norm_eps = decay_activation == "heavy_tail", decay_floor, norm_eps
        self.shared = self.rows * num_groups * state_size
        heads, rows = self.heads, self.rows
        for name, shape in (("dt_bias", (heads,)), ("D", (heads,)), ("B_bias", (heads, rows, state_size)), ("C_bias", (heads, rows, state_size))):
            self.register_parameter(name, nn.Parameter(torch.empty(shape, **factory)))
        self.in_proj = nn.Linear(hidden_size, sum(self._parts()), bias=False, **factory)
        self.B_norm, self.C_norm = _Weight(state_size, **factory), _Weight(state_size, **factory)
        self.out_proj = nn.Linear(self.inner, hidden_size, bias=False, **factory)
        for name in ("mimo_x", "mimo_z", "mimo_o") if self.mimo else ():
            self.register_parameter(name, nn.Parameter(torch.empty(heads, rows, head_dim, **factory)))
        self.norm = _Weight(self.inner, **factory) if output_norm else None
        self.reset_parameters()

    def _parts(self):
        return [self.inner, self.inner, self.shared, self.shared, self.heads, self.heads, self.heads, self.angles]

    def draw(self, name, p):
        if name in ("mimo_x", "mimo_o"):
            p.fill_(1 / self.rows)
        elif name in ("B_bias", "C_bias"):
            p.fill_(1.0)
        else:
            super().draw(name, p)

    def new_state(self, sequences: int, device=None, dtype: torch.dtype = torch.float32) -> Mamba3State:
        """The state of sequences that have not begun: zeros. dtype: float32 or float64."""
        zeros = self._zeros(device, dtype)
        return Mamba3State(zeros(sequences, self.heads, self.state_size, self.head_dim), zeros(sequences, self.rows, self.heads, self.state_size),
                           zeros(sequences, self.rows, self.heads, self.head_dim), zeros(sequences, self.heads, self.angles, kind=torch.float64),
                           zeros(sequences, kind=torch.int64))

    def _row(self, x, norm, bias):
        """[B, T, R, H, N]: of all heads, normed, with the bias."""
        exact = _exact(x)
        x = _rms(x.to(exact).unflatten(-1, (self.rows, self.groups, self.state_size)), self.norm_eps) * norm.weight.to(exact)
        return x.repeat_interleave(self.heads // self.groups, -2) + bias.to(exact).transpose(0, 1)

    def _rotated(self, x, cos, sin):
        """x [B, T, R, H, N] by the angles of cos and sin [B, T, 1, H, angles]."""
        count, n = self.angles, self.state_size
        if self.halves:
            a, b = x[..., :count], x[..., n // 2 : n // 2 + count]
            return torch.cat([a * cos - b * sin, x[..., count : n // 2], a * sin + b * cos, x[..., n // 2 + count :]], -1)
        a, b = x[..., : 2 * count].unflatten(-1, (count, 2)).unbind(-1)
        return torch.cat([torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2), x[..., 2 * count :]], -1)

    def forward(self, hidden_states, state=None, *, cu_seqlens=None, max_seqlen=None, output_state=False):
        """y [B, T, hidden_size]; with output_state (y, Mamba3State). The arguments are those of DeltaRuleLayer.forward()."""
        x, R = hidden_states, self.rows
        self.check(x)
        exact = _exact(x)
        z, v, b, c, dt, a, trap, angle = self.in_proj(x).split(self._parts(), -1)
        dt = F.softplus(dt.to(exact) + self.dt_bias.to(exact))
        a = a.to(exact)
        rate = torch.where(a >= 0, 1 + a, 1 / (1 - a.clamp(max=0))) if self.heavy_tail else F.softplus(a)
        g = -rate.clamp(min=self.floor) * dt
        lam = torch.sigmoid(trap.to(exact))
        turn = math.pi * torch.tanh(angle.to(exact)).double()[:, :, None] * dt.double()[..., None]
        theta = _summed(turn, None if state is None else state.angle, cu_seqlens)
        cos, sin = theta.cos().to(exact)[:, :, None], theta.sin().to(exact)[:, :, None]
        k, q = self._rotated(self._row(b, self.B_norm, self.B_bias), cos, sin), self._rotated(self._row(c, self.C_norm, self.C_bias), cos, sin)
        v = v.to(exact).unflatten(-1, (1, self.heads, self.head_dim))
        if self.mimo:
            v = v * self.mimo_x.to(exact).transpose(0, 1)
        o, recurrent = self._scan(q, k, v, g, lam * dt, (1 - lam) * dt * g.exp(), state, cu_seqlens, max_seqlen, output_state)
        y = o + self.D.to(exact)[:, None] * v
        if self.norm is not None:
            y = _rms(y, self.norm_eps) * self.norm.weight.to(exact).view(self.heads, self.head_dim)
        z = z.to(exact).unflatten(-1, (1, self.heads, self.head_dim))
        y = (y * F.silu(self.mimo_z.to(exact).transpose(0, 1) * z) * self.mimo_o.to(exact).transpose(0, 1)).sum(2) if self.mimo else (y * F.silu(z))[:, :, 0]
        y = self.out_proj(y.flatten(2).to(x.dtype))
        if not output_state:
            return y
        remembered = [_last(t, None if state is None else getattr(state, name), cu_seqlens) for name, t in (("k", k), ("v", v), ("angle", theta))]
        remembered[2] = torch.remainder(remembered[2], 2 * math.pi)
        return y, Mamba3State(recurrent, *remembered, self._tokens(x, state, cu_seqlens))

    def _scan(self, q, k, v, g, now, before, state, cu_seqlens, max_seqlen, output_state):
        """(what is read [B, T, R, H, P], the state). Rows of a token: R of the one before, which decay the state first, R of its own, R - 1 that only read."""
        R, per = self.rows, 3 * self.rows - 1
        k_before, v_before = (_previous(t, None if state is None else getattr(state, name), cu_seqlens) for name, t in (("k", k), ("v", v)))
        row = lambda t: t[:, :, None].expand(*t.shape[:2], R, self.heads)  # noqa: E731
        nothing = lambda t, count: t.new_zeros(*t.shape[:2], count, *t.shape[3:])  # noqa: E731
        rows = {
            "q": torch.cat([nothing(q, 2 * R - 1), q], 2),
            "k": torch.cat([k_before, k, nothing(k, R - 1)], 2),
            "v": torch.cat([v_before, v, nothing(v, R - 1)], 2),
            "g": torch.cat([g[:, :, None], g.new_zeros(*g.shape[:2], per - 1, self.heads)], 2),
            "write_gate": torch.cat([row(before), row(now), g.new_zeros(*g.shape[:2], R - 1, self.heads)], 2),
        }
        o, recurrent, _ = forward(_ROWS, **{name: t.flatten(1, 2) for name, t in rows.items()}, scale=1.0, initial_state=None if state is None else state.recurrent,
                                  output_final_state=output_state, cu_seqlens=None if cu_seqlens is None else cu_seqlens * per,
                                  max_seqlen=None if max_seqlen is None else max_seqlen * per)
        return o.unflatten(1, (-1, per))[:, :, 2 * R - 1 :], recurrent


class _ConjugateGradients(torch.autograd.Function):
    """a^-1 b of symmetric a [..., K, K] and b [..., K], from 0 until the residual is `tolerance` of b or `steps` steps are done. Backward solves in the same way."""

    @staticmethod
    def forward(ctx, a, b, steps, tolerance):
        x = _conjugate_gradients(a, b, steps, tolerance)
        ctx.save_for_backward(a, x)
        ctx.how = steps, tolerance
        return x

    @staticmethod
    def backward(ctx, dx):
        a, x = ctx.saved_tensors
        y = _conjugate_gradients(a, dx, *ctx.how)
        return -y[..., None] * x[..., None, :], y, None, None


def _conjugate_gradients(a, b, steps, tolerance):
    x, r, p = torch.zeros_like(b), b, b
    square = b.square().sum(-1, keepdim=True)
    enough = tolerance**2 * square
    for _ in range(steps):
        goes_on = square > enough
        if not torch.compiler.is_compiling() and not goes_on.any():
            break
        ap = (a @ p[..., None])[..., 0]
        along = torch.where(goes_on, square / (p * ap).sum(-1, keepdim=True), 0.0)
        x, r = x + along * p, r - along * ap
        after = r.square().sum(-1, keepdim=True)
        p = torch.where(goes_on, r + after / square * p, p)
        square = after
    return x


class Mesa(_SequenceLayer):
    """The Mesa layer (von Oswald et al. 2025): every token solves a regularized least squares. docs/rules/mesa.md has the mathematics.

    output_gate: "none", "silu" or "sigmoid". least_lambda: least regularisation. cg_steps: most steps of conjugate gradients, which end at a residual of
    cg_tolerance; 0: an exact solve by Cholesky. Both run in float64 as PyTorch operations, with a matrix [K, K] for every token and head in memory; the
    library reads the state.

    >>> layer = Mesa(32, 2)
    >>> y, state = layer(torch.randn(1, 5, 32), output_state=True)
    >>> y.shape, state.recurrent.shape
    (torch.Size([1, 5, 32]), torch.Size([1, 2, 16, 32]))
    """

    def __init__(self, hidden_size, num_heads, *, head_dim=None, conv_size=4, output_gate="none", least_lambda=0.25, cg_steps=0, cg_tolerance=1e-6, norm_eps=1e-5,
                 init="xavier", device=None, dtype=None):
        super().__init__()
        if head_dim is None and hidden_size % num_heads:
            raise Error(f"head_dim: expected a number, since num_heads = {num_heads} does not divide hidden_size = {hidden_size}, got None")
        head_dim = head_dim or hidden_size // num_heads
        _whole(hidden_size=(hidden_size, 1), num_heads=(num_heads, 1), head_dim=(head_dim, 1), conv_size=(conv_size, 1), cg_steps=(cg_steps, 0))
        if output_gate not in ("none", "silu", "sigmoid"):
            raise Error(f"output_gate: expected one of none, silu, sigmoid, got {output_gate!r}")
        if not least_lambda > 0:
            raise Error(f"least_lambda: expected a number above 0, got {least_lambda}")
        if not 0 <= cg_tolerance < 1:
            raise Error(f"cg_tolerance: expected a number from 0 to below 1, got {cg_tolerance}")
        factory = {"device": device, "dtype": dtype}
        self.hidden, self.heads, self.dim, self.conv_size, self.init = hidden_size, num_heads, head_dim, conv_size, init
        self.output_gate, self.least_lambda, self.norm_eps = output_gate, least_lambda, norm_eps
        self.cg_steps, self.cg_tolerance = cg_steps, cg_tolerance
        size = num_heads * head_dim
        for name in ("q_proj", "k_proj", "v_proj") + (("g_proj",) if output_gate != "none" else ()):
            self.add_module(name, nn.Linear(hidden_size, size, bias=False, **factory))
        self.a_proj, self.b_proj = nn.Linear(hidden_size, num_heads, **factory), nn.Linear(hidden_size, num_heads, **factory)
        self.q_conv1d, self.k_conv1d = _Weight(size, 1, conv_size, **factory), _Weight(size, 1, conv_size, **factory)
        self.lambda_params = nn.Parameter(torch.empty(size, **factory))
        self.o_norm, self.o_proj = _Weight(head_dim, **factory), nn.Linear(size, hidden_size, bias=False, **factory)
        self.reset_parameters()

    def draw(self, name, p):
        if name == "lambda_params":
            p.fill_(math.log(math.expm1(1 - self.least_lambda)) if self.least_lambda < 1 else 0.0)
        elif name.endswith("_conv1d.weight"):
            p.uniform_(-(self.conv_size**-0.5), self.conv_size**-0.5)
        else:
            super().draw(name, p)

    def new_state(self, sequences: int, device=None, dtype: torch.dtype = torch.float32) -> LayerState:
        """The state of sequences that have not begun: zeros, values beside keys. dtype: float32 or float64."""
        zeros = self._zeros(device, dtype)
        return LayerState(zeros(sequences, self.heads, self.dim, 2 * self.dim),
                          zeros(sequences, self.conv_size - 1, 2 * self.heads * self.dim) if self.conv_size > 1 else None, None, zeros(sequences, kind=torch.int64))

    def forward(self, hidden_states, state=None, *, cu_seqlens=None, max_seqlen=None, output_state=False):
        """y [B, T, hidden_size]; with output_state (y, LayerState). The arguments are those of DeltaRuleLayer.forward()."""
        x = hidden_states
        self.check(x)
        exact = _exact(x)
        qk, conv = short_conv(torch.cat([self.q_proj(x), self.k_proj(x)], -1), torch.cat([self.q_conv1d.weight, self.k_conv1d.weight]), None,
                              None if state is None else state.conv, output_final_state=output_state, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        unit = qk.to(exact).unflatten(-1, (2 * self.heads, self.dim))
        q, k = (unit * torch.rsqrt(unit.square().sum(-1, keepdim=True) + 1e-6)).chunk(2, -2)
        v = self.v_proj(x).to(exact).unflatten(-1, (self.heads, self.dim))
        g, beta = F.logsigmoid(self.a_proj(x).to(exact)), torch.sigmoid(self.b_proj(x).to(exact))
        read = self._solved(q, k, g, beta, None if state is None else state.recurrent[..., self.dim :], cu_seqlens).to(exact)
        o, recurrent, _ = forward(_ROWS, read, k, torch.cat([v, k], -1), g=g, write_gate=beta, scale=1.0, initial_state=None if state is None else state.recurrent,
                                  output_final_state=output_state, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        n = (_rms(o[..., : self.dim].to(exact), self.norm_eps) * self.o_norm.weight.to(exact)).flatten(2)
        if self.output_gate != "none":
            gate = self.g_proj(x).to(exact)
            n = n * (F.silu(gate) if self.output_gate == "silu" else torch.sigmoid(gate))
        y = self.o_proj(n.to(x.dtype))
        if not output_state:
            return y
        return y, LayerState(recurrent, conv.to(recurrent.dtype) if self.conv_size > 1 else None, None, self._tokens(x, state, cu_seqlens))

    def _solved(self, q, k, g, beta, begin, cu_seqlens):
        """(sum of decayed beta k k^T up to a token + lambda)^-1 q, in float64."""
        q, k, g, beta = q.double(), k.double(), g.double(), beta.double()
        tokens = q.shape[1]
        token = torch.arange(tokens, device=q.device)
        if cu_seqlens is None:
            sequence, start = torch.zeros_like(token), torch.zeros_like(token)
        else:
            offsets = _offsets(q, cu_seqlens)
            sequence = _sequence(token, offsets)
            start = offsets.index_select(0, sequence)
        # The log of what is left at a token of what stood before its sequence's first token, and of what was written at an earlier token.
        total = g.cumsum(1)
        left = total - (total - g).index_select(1, start)
        outer = (beta[..., None] * k)[..., None] * k[..., None, :]
        parts, carried = [], None
        for first in range(0, tokens, _CHUNK):
            last = min(first + _CHUNK, tokens)
            own, log = outer[:, first:last].flatten(3), total[:, first:last]
            after = (start[first:last, None] <= token[first:last]) & (token[first:last, None] >= token[first:last])
            weights = (log[:, :, None] - log[:, None]).masked_fill(~after[None, :, :, None], -math.inf).exp()
            part = torch.einsum("btih,bihn->bthn", weights, own)
            if carried is not None:
                kept = (log - total[:, first - 1, None]).masked_fill((start[first:last] >= first)[None, :, None], -math.inf).exp()
                part = part + kept[..., None] * carried[:, None]
            carried = part[:, -1]
            parts.append(part)
        sums = (torch.cat(parts, 1) if parts else outer.flatten(3)).unflatten(-1, k.shape[-1:] * 2)
        if begin is not None:
            begin = begin.double()
            sums = sums + left.exp()[..., None, None] * (begin[:, None] if cu_seqlens is None else begin.index_select(0, sequence)[None])
        regular = F.softplus(self.lambda_params.double()).view(self.heads, self.dim) + self.least_lambda
        matrix = sums + torch.diag_embed(regular)
        if self.cg_steps:
            return _ConjugateGradients.apply(matrix, q, self.cg_steps, self.cg_tolerance)
        lower = torch.linalg.cholesky(matrix)
        return torch.cholesky_solve(q[..., None], lower)[..., 0]


class _LowRank(nn.Module):
    def __init__(self, hidden, rank, act, bias, **factory):
        super().__init__()
        self.lora = nn.Sequential(nn.Linear(hidden, rank, bias=False, **factory), act, nn.Linear(rank, hidden, bias=bias, **factory))

    def forward(self, x):
        return self.lora(x)


class _Affine(nn.Module):
    def __init__(self, size, **factory):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(size, **factory)), nn.Parameter(torch.empty(size, **factory))


class RWKV7(_SequenceLayer):
    """RWKV-7's layer (Peng et al. 2025): the rule dplr with token shift and low-rank gates. docs/rules/rwkv7.md has the mathematics.

    head_dim: of keys and values; it divides hidden_size. decay_rank, rate_rank, value_rank, gate_rank: 0: as published, by the width.
    key_eps: epsilon inside the root of the key's norm; 0: none. layer, layers: which layer of how many, for initial values.
    first: whether it is a model's first such layer, whose values the others mix with their own; None: layer is 0.

    >>> first, second = RWKV7(32, head_dim=16), RWKV7(32, head_dim=16, layer=1, layers=2)
    >>> y, v_first = first(torch.randn(1, 5, 32))
    >>> y, _ = second(y, v_first=v_first)
    >>> y.shape
    torch.Size([1, 5, 32])
    """

    def __init__(self, hidden_size, *, head_dim=64, decay_rank=0, rate_rank=0, value_rank=0, gate_rank=0, key_eps=0.0, norm_eps=1e-5, layer=0, layers=1, first=None,
                 device=None, dtype=None):
        super().__init__()
        _whole(hidden_size=(hidden_size, 1), head_dim=(head_dim, 1), layer=(layer, 0), layers=(layers, layer + 1))
        if hidden_size % head_dim:
            raise Error(f"head_dim: expected a divisor of hidden_size = {hidden_size}, got {head_dim}")
        factory = {"device": device, "dtype": dtype}
        self.hidden, self.heads, self.dim, self.key_eps, self.norm_eps = hidden_size, hidden_size // head_dim, head_dim, key_eps, norm_eps
        self.layer, self.layers, self.first = layer, layers, layer == 0 if first is None else first
        rank = lambda given, roots: given or max(round(roots * hidden_size**0.5 / 32), 1) * 32  # noqa: E731
        wider = head_dim / 64
        for name in "rwkvag":
            self.register_parameter(f"x_{name}", nn.Parameter(torch.empty(1, 1, hidden_size, **factory)))
        self.k_k, self.k_a = nn.Parameter(torch.empty(hidden_size, **factory)), nn.Parameter(torch.empty(hidden_size, **factory))
        self.r_k = nn.Parameter(torch.empty(self.heads, head_dim, **factory))
        for name in "rkvo":
            self.add_module(f"{name}_proj", nn.Linear(hidden_size, hidden_size, bias=False, **factory))
        self.w_lora = _LowRank(hidden_size, rank(decay_rank, 2.5 * wider), nn.Tanh(), True, **factory)
        if not self.first:
            self.v_lora = _LowRank(hidden_size, rank(value_rank, 1.7 * wider), nn.Identity(), True, **factory)
        self.a_lora = _LowRank(hidden_size, rank(rate_rank, 2.5 * wider), nn.Identity(), True, **factory)
        self.g_lora = _LowRank(hidden_size, rank(gate_rank, 5), nn.Sigmoid(), False, **factory)
        self.g_norm = _Affine(hidden_size, **factory)
        self.reset_parameters()

    def draw(self, name, p):
        d, left, bound = self.hidden, 1 - self.layer / self.layers, self.hidden**-0.5
        depth = self.layer / (self.layers - 1) if self.layers > 1 else 0.0
        n = torch.arange(d, dtype=torch.float64, device=p.device)
        linear = n / max(d - 1, 1) - 0.5
        zigzag = (n % self.dim - (self.dim - 1) / 2) / max((self.dim - 1) / 2, 0.5)
        zigzag = zigzag * zigzag.abs()
        powers = {"x_r": 0.2, "x_w": 0.9, "x_k": 0.7, "x_v": 0.7, "x_a": 0.9, "x_g": 0.2}
        constants = {"k_a": 1.02, "r_k": -0.04, "o_proj.weight": 0.0, "g_norm.weight": ((self.layer + 1) / self.layers) ** 0.7, "g_norm.bias": 0.0}
        vectors = {"k_k": 0.71 - 0.1 * linear, "w_lora.lora.2.bias": 6 * (linear + 0.5) ** (1 + depth**0.3) - 5.5 + 2.5 * zigzag,
                   "v_lora.lora.2.bias": 0.73 - 0.4 * linear, "a_lora.lora.2.bias": 0.3 * zigzag + 0.4 * linear - 0.19}
        if name in powers:
            p.copy_((1 - (n / d) ** (powers[name] * left)).view_as(p))
        elif name in vectors:
            p.copy_(vectors[name])
        elif name in constants or name.endswith("lora.0.weight"):
            p.fill_(constants.get(name, 0.0))
        elif name.endswith("lora.2.weight"):
            p.normal_(0.0, 0.1 * bound)
        else:
            size = 0.05 * bound if name == "k_proj.weight" else 0.5 * bound
            p.uniform_(-size, size)

    def new_state(self, sequences: int, device=None, dtype: torch.dtype = torch.float32) -> LayerState:
        """The state of sequences that have not begun: zeros; conv is the last input. dtype: float32 or float64."""
        zeros = self._zeros(device, dtype)
        return LayerState(zeros(sequences, self.heads, self.dim, self.dim), zeros(sequences, 1, self.hidden), None, zeros(sequences, kind=torch.int64))

    def forward(self, hidden_states, state=None, *, v_first=None, cu_seqlens=None, max_seqlen=None, output_state=False):
        """(y, v_first) of hidden_states [B, T, hidden_size]; with output_state (y, v_first, LayerState).

        v_first: [B, T, hidden_size], what the model's first such layer gave; None for that layer. Other arguments: as DeltaRuleLayer.forward() has them.
        """
        x = hidden_states
        self.check(x)
        if (v_first is None) != self.first:
            raise Error(f"v_first: expected {'None in the first layer' if self.first else 'what the first layer gave'}, got {'None' if v_first is None else 'a tensor'}")
        exact = _exact(x)
        shifted = _previous(x, None if state is None else state.conv[:, 0], cu_seqlens) - x
        mixed = {name: x + shifted * getattr(self, f"x_{name}") for name in "rwkvag"}
        heads = lambda t: t.unflatten(-1, (self.heads, self.dim))  # noqa: E731
        r, k, v = self.r_proj(mixed["r"]), self.k_proj(mixed["k"]).to(exact), self.v_proj(mixed["v"])
        g = -math.exp(-0.5) * torch.sigmoid(self.w_lora(mixed["w"]).to(exact))
        rate = torch.sigmoid(self.a_lora(mixed["a"]).to(exact))
        if self.first:
            v_first = v
        else:
            v = v + (v_first - v) * torch.sigmoid(self.v_lora(mixed["v"]))
        raw = heads(k * self.k_k.to(exact))
        squares = raw.square().sum(-1, keepdim=True)
        unit = raw * (torch.rsqrt(squares + self.key_eps) if self.key_eps else 1 / squares.sqrt().clamp(min=1e-12))
        k = k * (1 + (rate - 1) * self.k_a.to(exact))
        o, recurrent, _ = forward("dplr", heads(r), heads(k.to(x.dtype)), heads(v), g=heads(g), erase_key=unit.to(x.dtype), erase_write=(unit * heads(rate)).to(x.dtype), scale=1.0,
                                  initial_state=None if state is None else state.recurrent, output_final_state=output_state, cu_seqlens=cu_seqlens,
                                  max_seqlen=max_seqlen)
        o = o.to(exact)
        o = o - o.mean(-1, keepdim=True)
        n = _rms(o, self.dim * self.norm_eps).flatten(2) * self.g_norm.weight.to(exact) + self.g_norm.bias.to(exact)
        bonus = (heads(r.to(exact)) * heads(k) * self.r_k.to(exact)).sum(-1, keepdim=True) * heads(v.to(exact))
        y = self.o_proj(((n + bonus.flatten(2)) * self.g_lora(mixed["g"]).to(exact)).to(x.dtype))
        if not output_state:
            return y, v_first
        last = _last(x, None if state is None else state.conv[:, 0], cu_seqlens)
        return y, v_first, LayerState(recurrent, last[:, None].to(recurrent.dtype), None, self._tokens(x, state, cu_seqlens))


for _one in (LonghornDiag, Mamba, Mamba2, Mamba3, Mamba3State, Mesa, RWKV7):
    _one.__module__ = "fastweight.torch.nn"  # where they are found
