"""PyTorch layers: DeltaRuleLayer of every rule, a class for each published layer, and the short convolution.

    >>> import torch
    >>> from fastweight.torch.nn import GatedDeltaNet
    >>> layer = GatedDeltaNet(hidden_size=64, num_heads=2)
    >>> layer(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])

Parameters have the names, shapes and initial values of the engine's layers, and so those of flash-linear-attention (FLA)
where FLA has the layer: a state_dict moves between the three. Names that FLA has otherwise (g_norm_swish_gate, gk_proj)
are understood when one is loaded. All layers run under autocast, torch.compile,
activation checkpointing, DistributedDataParallel and FSDP2. Mamba, LonghornDiag, Mamba2, Mamba3, Mesa and RWKV7 are no rules:
the library runs their recurrences, PyTorch the rest.
"""

from __future__ import annotations

import typing

import torch
import torch.nn.functional as F
from torch import nn

from fastweight._library import Error
from fastweight.torch import _arguments, _conv, _layer, forward, step

__all__ = [
    "Comba", "DeltaNet", "DeltaRuleLayer", "GatedDeltaNet", "GatedDeltaNet2", "GatedLinearAttention", "HGRN2", "KaczmarzLinearAttention", "KimiDeltaAttention",
    "LayerState", "LinearAttention", "LonghornDiag", "Mamba", "Mamba2", "Mamba3", "Mamba3State", "Mesa", "PreconditionedDeltaNet", "PreconditionedGatedDeltaNet",
    "PreconditionedKDA", "QDelta", "RWKV7", "RetNet", "ScalarDecayAttention", "short_conv", "short_conv_step",
]


def __dir__() -> list[str]:
    return list(__all__)


class LayerState(typing.NamedTuple):
    """What a layer remembers between calls, of N sequences.

    recurrent: [N, HV, K, V]. conv: [N, W - 1, channels], the last inputs of the convolution, oldest first; None without
    one. precond: [N, H, K] of preconditioned rules, else None. tokens: int64 [N], tokens seen so far.

    >>> state = GatedDeltaNet(16, 2).new_state(3)
    >>> state.recurrent.shape, state.conv.shape, state.precond
    (torch.Size([3, 2, 8, 8]), torch.Size([3, 3, 48]), None)
    """

    recurrent: torch.Tensor
    conv: typing.Optional[torch.Tensor]
    precond: typing.Optional[torch.Tensor]
    tokens: torch.Tensor


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    *,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(y, final_state) of a causal depthwise convolution with SiLU; differentiable. On CUDA W is at most 8.

    y[t, c] = silu(bias[c] + sum over j < W of weight[c, W - 1 - j] x[t - j, c])

    x: [B, T, D]. weight: [D, W] or [D, 1, W]. bias: [D].
    initial_state: [N, W - 1, D], the inputs before each sequence, oldest first; zero if None. final_state is like it.
    cu_seqlens, max_seqlen: packed sequences, as in fastweight.torch.forward.

    Raises fastweight.Error for wrong arguments.

    >>> x, weight = torch.randn(1, 5, 3), torch.randn(3, 4)
    >>> y, state = short_conv(x, weight, output_final_state=True)
    >>> torch.equal(state, x[:, 2:])
    True
    """
    _check_conv(x, weight, bias, initial_state, 3)
    _arguments.check_offsets(cu_seqlens, x)
    return _conv.short_conv(x, weight, bias, initial_state, output_final_state, cu_seqlens, max_seqlen)


def short_conv_step(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y [N, D] of one token of each sequence; state [N, W - 1, D] is updated in place. No gradients.

    x: [N, D]. weight, bias: as in short_conv(). state: contiguous, of the type that short_conv() computes in: that of x
    for float32, float64 and, on CUDA, bfloat16; float32 for others.

    >>> x, weight, state = torch.randn(2, 3), torch.randn(3, 4), torch.zeros(2, 3, 3)
    >>> y = short_conv_step(x, weight, state)
    >>> y.shape, torch.equal(state[:, -1], x)
    (torch.Size([2, 3]), True)
    """
    _check_conv(x, weight, bias, state, 2)
    weight = weight.reshape(weight.shape[0], -1)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        raise Error("short_conv_step: expected tensors without gradients (torch.no_grad()), got one that requires them; short_conv() has gradients")
    run = state.dtype
    parameters = torch.float64 if run == torch.float64 else torch.float32
    y = torch.ops.fastweight.short_conv_step_(x[:, None].to(run), weight.to(parameters), None if bias is None else bias.to(parameters), state)
    return y[:, 0].to(x.dtype)


def _check_conv(x, weight, bias, state, rank):
    for name, tensor, ranks in (("x", x, (rank,)), ("weight", weight, (2, 3)), ("bias", bias, (1,)), ("state", state, (3,))):
        if tensor is None and name in ("bias", "state"):
            continue
        if not isinstance(tensor, torch.Tensor) or tensor.dim() not in ranks or not tensor.dtype.is_floating_point:
            got = f"{tensor.dtype} of shape {list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise Error(f"{name}: expected a floating-point tensor of {' or '.join(map(str, ranks))} dimensions, got {got}")
        if tensor.device != x.device:
            raise Error(f"{name}: expected a tensor on {x.device}, as x is, got one on {tensor.device}")
    if weight.dim() == 3 and weight.shape[1] != 1 or weight.shape[0] != x.shape[-1]:
        raise Error(f"weight: expected [D, W] or [D, 1, W] with D = {x.shape[-1]} as x has, got shape {list(weight.shape)}")


class _Weight(nn.Module):
    """A parameter called `weight`, as norms and convolutions have it."""

    def __init__(self, *shape, **factory):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, **factory))


class _Map(nn.Module):
    """The product of two affine maps of a head."""

    def __init__(self, dim, **factory):
        super().__init__()
        self.layer1, self.layer2 = nn.Linear(dim, dim, **factory), nn.Linear(dim, dim, **factory)

    def forward(self, x):
        return self.layer1(x) * self.layer2(x)


class DeltaRuleLayer(nn.Module):
    """The layer of a rule: projections, short convolution, gates, recurrence, gated norm, output projection.

    hidden_size: width of x and of the result. num_heads: key heads H. num_v_heads: value heads HV, a multiple of H; None: H.
    rule: a named rule or axes, as in fastweight.torch.forward. The projections that a layer has follow from it.
    head_dim: K; None: hidden_size / num_heads. expand_v: V / K.
    conv_size: width of the convolution with SiLU over q, k and v; 0: neither.
    output_gate: "silu", "sigmoid" or "none". output_gate_rank, decay_rank: of low-rank projections; 0: full.
    output_gate_bias: a bias on an output gate of a low rank.
    output_norm: RMSNorm of every "head" or over the whole "width". norm_eps: its epsilon.
    decay_per_value_head: whether a channel decay has HV heads in place of H.
    decay_gate: of a channel decay: "softplus", "logsigmoid" (GLA), or "bounded" (HGRN2: forward() takes lower_bound).
    feature_map: of q and k: "none", "elu" (plus 1), "relu", "silu" or "product". rope_theta: base of a rotary embedding; 0: none.
    allow_neg_eigval: erase gain up to 2. precond_x: range of a preconditioner, 1 to 2. precond_gates: "own" or "tied".
    precond_center: log_atk_scale is the center ("parameter") or its logarithm ("exp").
    raw_read_correction: q - D p before the norms (Comba). gain_source: "projection" or "learned". single_gate: decay = 1 - gain.
    gain_factor: "none", "1/t", "1/sqrt(t)" or "1/log(t+1)". init: "xavier", "normal" or "torch".
    check: as in fastweight.torch.forward.

    Raises fastweight.Error for an argument that is wrong. The mathematics is in docs/recurrence.md, section 7.

    >>> layer = DeltaRuleLayer(32, 2, "decay=channel gain=longhorn k_norm=l2", num_v_heads=4)
    >>> y, state = layer(torch.randn(1, 6, 32), output_state=True)
    >>> with torch.no_grad():
    ...     layer.step(torch.randn(1, 32), state).shape
    torch.Size([1, 32])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        rule: str = "gated_deltanet",
        *,
        num_v_heads: int | None = None,
        head_dim: int | None = None,
        expand_v: float = 1.0,
        conv_size: int = 4,
        output_gate: str = "silu",
        output_gate_rank: int = 0,
        output_gate_bias: bool = True,
        output_norm: str = "head",
        norm_eps: float = 1e-5,
        decay_rank: int = 0,
        decay_per_value_head: bool = False,
        decay_gate: str = "softplus",
        feature_map: str = "none",
        rope_theta: float = 0.0,
        allow_neg_eigval: bool = False,
        precond_x: float = 1.5,
        precond_gates: str = "own",
        precond_center: str = "parameter",
        raw_read_correction: bool = False,
        gain_source: str = "projection",
        gain_factor: str = "none",
        single_gate: bool = False,
        init: str = "xavier",
        check: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if head_dim is None:
            if hidden_size % num_heads:
                raise Error(f"head_dim: expected a number, since num_heads = {num_heads} does not divide hidden_size = {hidden_size}, got None")
            head_dim = hidden_size // num_heads
        self.spec = spec = _layer.Spec(
            hidden_size, num_heads, num_v_heads or num_heads, head_dim, round(head_dim * expand_v), conv_size, output_gate, output_gate_rank, output_gate_bias, output_norm,
            norm_eps, decay_rank, decay_per_value_head, decay_gate, feature_map, float(rope_theta), precond_gates, precond_center,
            raw_read_correction, gain_source, gain_factor, single_gate, init, *_layer.resolved(rule, allow_neg_eigval, precond_x))
        _layer.validate(spec, expand_v)
        self.rule, self.check = spec.rule, check
        factory = {"device": device, "dtype": dtype}
        for name, shape, bias in _layer.projections(spec):
            if len(shape) == 2:
                self.add_module(name, nn.Linear(shape[1], shape[0], bias=bias, **factory))
            else:
                out, rank, inner = shape
                self.add_module(name, nn.Sequential(nn.Linear(inner, rank, bias=False, **factory), nn.Linear(rank, out, bias=bias, **factory)))
        for name, shape in _layer.vectors(spec):
            self.register_parameter(name, nn.Parameter(torch.empty(shape, **factory)))
        for name, shape in _layer.weights(spec):
            self.add_module(name, _Weight(*shape, **factory))
        if feature_map == "product":
            self.feature_map_q, self.feature_map_k = _Map(head_dim, **factory), _Map(head_dim, **factory)
        self.o_proj = nn.Linear(spec.value_size, hidden_size, bias=False, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws initial values by the engine's distributions (not its random numbers)."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if not parameter.is_meta:
                    _layer.initialise(self.spec, name, parameter)

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        for theirs, ours in _layer.fla_names(self.spec):
            for key in [key for key in state_dict if key.startswith(f"{prefix}{theirs}.")]:
                state_dict[f"{prefix}{ours}{key[len(prefix) + len(theirs):]}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        s = self.spec
        return f"{s.hidden}, heads={s.heads}, v_heads={s.v_heads}, key_dim={s.key_dim}, value_dim={s.value_dim}, rule={s.rule!r}"

    def new_state(self, sequences: int, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32) -> LayerState:
        """The state of sequences that have not begun: zeros. dtype: float32 or float64."""
        s = self.spec
        zeros = lambda *shape, kind=dtype: torch.zeros(shape, dtype=kind, device=device or self.o_proj.weight.device)  # noqa: E731
        return LayerState(zeros(sequences, s.v_heads, s.key_dim, s.value_dim), zeros(sequences, s.conv_size - 1, s.conv_channels) if s.conv_size > 1 else None,
                          zeros(sequences, s.heads, s.key_dim) if s.uses("precond_g") else None, zeros(sequences, kind=torch.int64))

    def forward(
        self,
        hidden_states: torch.Tensor,
        state: LayerState | None = None,
        *,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        output_state: bool = False,
        lower_bound: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, LayerState]:
        """y [B, T, hidden_size] of hidden_states [B, T, hidden_size]; with output_state (y, LayerState).

        state: where the sequences begin; None: new ones. It is not changed.
        cu_seqlens, max_seqlen: packed sequences, as in fastweight.torch.forward.
        lower_bound: of decay_gate="bounded": [H K] in [0, 1), the bound of this layer's decays; None: 0.
        """
        s, x = self.spec, hidden_states
        if x.dim() != 3 or x.shape[-1] != s.hidden:
            raise Error(f"hidden_states: expected [B, T, {s.hidden}], got shape {list(x.shape)}")
        qkv = self._projected(x)
        conv = None
        if s.conv_size > 0:
            qkv, conv = short_conv(qkv, self._conv_weight(), None, None if state is None else state.conv, output_final_state=output_state, cu_seqlens=cu_seqlens,
                                   max_seqlen=max_seqlen)
        begin, places = (None if state is None else state.tokens), None
        if s.rope_theta or s.gain_factor != "none":
            places = _layer.places(x, begin, cu_seqlens)
        tensors, gates = self._tokens(x, qkv, places, lower_bound)
        o, recurrent, precond = forward(
            s.rule, **tensors, gates=gates, initial_state=None if state is None else state.recurrent, initial_precond=None if state is None else state.precond,
            output_final_state=output_state, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, check=self.check)
        y = self._out(x, o)
        if not output_state:
            return y
        lengths = _layer.lengths(x, cu_seqlens)
        if s.conv_size > 1:
            conv = conv.to(recurrent.dtype)
        return y, LayerState(recurrent, conv if s.conv_size > 1 else None, precond, lengths if begin is None else begin + lengths)

    def step(self, hidden_states: torch.Tensor, state: LayerState, *, lower_bound: torch.Tensor | None = None) -> torch.Tensor:
        """y [N, hidden_size] of one token of each sequence, hidden_states [N, hidden_size]; state is updated in place. No gradients."""
        s, x = self.spec, hidden_states
        if x.dim() != 2 or x.shape[-1] != s.hidden:
            raise Error(f"hidden_states: expected [N, {s.hidden}], got shape {list(x.shape)}")
        x = x[:, None]
        with torch.no_grad():
            qkv = self._projected(x)
            if s.conv_size > 1:
                qkv = short_conv_step(qkv[:, 0], self._conv_weight(), state.conv)[:, None]
            elif s.conv_size == 1:
                qkv = short_conv(qkv, self._conv_weight())[0]
            tensors, gates = self._tokens(x, qkv, state.tokens[:, None], lower_bound)
            o = step(s.rule, tensors.pop("q"), tensors.pop("k"), tensors.pop("v"), state.recurrent, state.precond, gates=gates, check=self.check, **tensors)
            state.tokens.add_(1)
            return self._out(x, o)[:, 0]

    def _projected(self, x):
        """q, k and v side by side."""
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)] if self.spec.uses("k") else [self.q_proj(x), self.v_proj(x)], -1)

    def _conv_weight(self):
        parts = [self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight] if self.spec.uses("k") else [self.q_conv1d.weight, self.v_conv1d.weight]
        return torch.cat(parts, 0)

    def _mapped(self, x, side, places):
        s = self.spec
        x = x.unflatten(-1, (s.heads, s.key_dim))
        if s.feature_map == "product":
            x = (self.feature_map_q if side == "q" else self.feature_map_k)(x)
        elif s.feature_map != "none":
            x = {"elu": F.elu, "relu": F.relu, "silu": F.silu}[s.feature_map](x) + (1 if s.feature_map == "elu" else 0)
        return _layer.turned(x, places, s.rope_theta) if s.rope_theta else x

    def _tokens(self, x, qkv, places, lower_bound):
        """The recurrence's tensors, and which of them are logits."""
        s = self.spec
        keys = s.heads * s.key_dim
        q, k = self._mapped(qkv[..., :keys], "q", places), None
        if s.uses("k"):
            k = self._mapped(qkv[..., keys : 2 * keys], "k", places)
        t = {"q": q, "k": k, "v": qkv[..., -s.value_size :].unflatten(-1, (s.v_heads, s.value_dim))}
        gates = []
        exact = torch.float64 if x.dtype == torch.float64 else torch.float32
        self._gains(t, gates, x, places, exact)
        self._erase_keys(t, x, exact)
        if s.uses("lambda_"):
            t["lambda_"] = self.l_proj(x) + self.l_bias
            gates.append("lambda=sigmoid")
        if s.uses("read_correction"):
            t["read_correction"] = _layer.per_value_head(self.D, s).expand(*x.shape[:2], s.v_heads)
        self._decays(t, gates, x, exact, lower_bound)
        if s.raw_read_correction:
            p = t["erase_key"] if s.uses("erase_key") else k
            t["q"] = q - self.D[:, None].to(q.dtype) * p
        return t, " ".join(gates) or None

    def _gains(self, t, gates, x, places, exact):
        s = self.spec
        if s.uses("beta"):
            if s.gain_source == "learned":
                logits = self.gain.to(exact).expand(*x.shape[:2], s.v_heads)
            else:
                logits = (self.beta_proj if s.projects_erase else self.b_proj)(x)
            bound = s.gain_bound if s.gain_doubles else 1.0
            if s.takes_beta_logits:
                t["beta"] = logits
                gates.append("beta=sigmoid")
            else:
                beta = sigmoid = bound * torch.sigmoid(logits.to(exact))
                if s.gain_factor != "none":
                    beta = beta * _layer.factor(s.gain_factor, places + 1, exact)[..., None]
                if s.single_gate:
                    t["g"] = torch.log1p(-sigmoid)
                t["beta"] = beta
        if s.derives_erase_gate:
            t["erase_gate"] = t["beta"] * _layer.per_value_head(torch.sigmoid(self.decay.to(exact)), s)
        elif s.uses("erase_gate"):
            t["erase_gate"] = self.b_proj(x) if s.scalar_erase else self.b_proj(x).unflatten(-1, (s.heads, s.key_dim))
            gates.append("erase_gate=sigmoid")
        if s.uses("write_gate"):
            t["write_gate"] = self.w_proj(x) if s.scalar_write else self.w_proj(x).unflatten(-1, (s.v_heads, s.value_dim))
            gates.append("write_gate=sigmoid")

    def _erase_keys(self, t, x, exact):
        s = self.spec
        if s.uses("erase_write"):
            k = t["k"].to(exact)
            n = k * torch.rsqrt(k.square().mean(-1, keepdim=True) + 1e-6) * self.e_norm.weight.to(exact)
            t["erase_write"] = n * torch.sigmoid(self.e_proj(x).to(exact)).unflatten(-1, (s.heads, s.key_dim))
            if s.uses("erase_key"):
                t["erase_key"] = n
        elif s.uses("erase_key"):
            t["erase_key"] = t["k"] * torch.sigmoid(self.decay)[:, None].to(t["k"].dtype)

    def _decays(self, t, gates, x, exact, lower_bound):
        s = self.spec
        if s.uses("g") and not s.single_gate:
            channel = s.decay == "channel"
            logits = (self.f_proj if channel else self.a_proj)(x)
            if channel:
                logits = logits.unflatten(-1, (s.decay_heads, s.key_dim))
            if s.decay_gate == "bounded" and channel:
                t["g"] = _layer.bounded_decay(logits.to(exact), None if lower_bound is None else lower_bound.to(exact).view(s.decay_heads, s.key_dim))
            elif s.decay_gate == "logsigmoid" and channel:  # its bias is the projection's
                t["g"] = logits
                gates.append("g=logsigmoid divisor=16")
            elif s.precond_gates == "tied" and s.uses("precond_g"):
                t["g"] = -self.A_log.to(exact).exp() * F.softplus(logits.to(exact) + self.dt_bias.to(exact))
            else:
                t["g"] = logits
                t["a_log"] = self.A_log.to(exact).reshape(-1)
                t["dt_bias"] = self.dt_bias.to(exact).reshape(logits.shape[2:])
                gates.append("g=softplus")
        if s.uses("precond_center"):
            center = self.log_atk_scale.to(exact)
            t["precond_center"] = center.exp() if s.precond_center == "exp" else center
        if s.uses("precond_g"):
            if s.precond_gates == "tied":
                t["precond_g"], t["precond_beta"] = (t[name].unflatten(-1, (s.heads, -1)).mean(-1) for name in ("g", "beta"))
            else:
                t["precond_g"], t["precond_beta"] = self.a_atk_proj(x), self.b_atk_proj(x)
                t["precond_a_log"], t["precond_dt_bias"] = self.A_log_atk.to(exact), self.dt_bias_atk.to(exact)
                gates.append("precond_g=softplus precond_beta=sigmoid")

    def _out(self, x, o):
        s = self.spec
        exact = torch.float64 if o.dtype == torch.float64 else torch.float32
        n = o.to(exact).flatten(2) if s.output_norm == "width" else o.to(exact)
        n = n * torch.rsqrt(n.square().mean(-1, keepdim=True) + s.norm_eps) * self.o_norm.weight.to(exact)
        n = n if s.output_norm == "width" else n.flatten(2)
        if s.output_gate != "none":
            gate = self.g_proj(x).to(exact)
            n = n * (F.silu(gate) if s.output_gate == "silu" else torch.sigmoid(gate))
        return self.o_proj(n.to(x.dtype))


def _named(name, rule, text, low_rank=False, **defaults):
    """A class of layers with a rule and other defaults. low_rank: decay and output gate have ranks of the value dimension."""

    def __init__(self, hidden_size, num_heads, **options):
        own = {"rule": rule, **defaults}
        if low_rank:
            rank = round((options.get("head_dim") or hidden_size // num_heads) * options.get("expand_v", 1.0))
            own.update(decay_rank=rank, output_gate_rank=rank)
        DeltaRuleLayer.__init__(self, hidden_size, num_heads, **{**own, **options})

    changes = [f"{key}={value!r}" for key, value in {"rule": rule, **defaults}.items()] + ["decay_rank and output_gate_rank of the value dimension"] * low_rank
    doc = f"""{text}

    DeltaRuleLayer with {', '.join(changes)}. Its arguments are taken by name, and the result is as there.

    >>> layer = {name}(32, 2)
    >>> layer(torch.randn(1, 5, 32)).shape
    torch.Size([1, 5, 32])
    """
    return type(name, (DeltaRuleLayer,), {"__init__": __init__, "__doc__": doc, "__module__": __name__})


LinearAttention = _named("LinearAttention", "linear_attention", "Linear attention (Katharopoulos et al. 2020).", conv_size=0, feature_map="product", output_gate="none")
RetNet = _named("RetNet", "retnet", "Retention (Sun et al. 2023).", conv_size=0, rope_theta=10000.0)
ScalarDecayAttention = _named("ScalarDecayAttention", "mamba2", "Mamba-2's scan in the family's layer (Dao and Gu 2024).")
GatedLinearAttention = _named("GatedLinearAttention", "gla", "Gated linear attention (Yang et al. 2023).", conv_size=0, decay_rank=16, decay_gate="logsigmoid")
HGRN2 = _named("HGRN2", "hgrn2", "HGRN2 (Qin et al. 2024).", conv_size=0, output_gate="none", output_norm="width", decay_gate="bounded")
DeltaNet = _named("DeltaNet", "deltanet", "DeltaNet (Yang et al. 2024).", output_gate="none")
GatedDeltaNet = _named("GatedDeltaNet", "gated_deltanet", "Gated DeltaNet (Yang et al. 2024).")
GatedDeltaNet2 = _named("GatedDeltaNet2", "gated_deltanet2", "Gated DeltaNet-2: channel gates of erase and write.", True, output_gate="sigmoid")
KimiDeltaAttention = _named("KimiDeltaAttention", "kda", "Kimi Delta Attention (Kimi Linear 2025).", True, output_gate="sigmoid", decay_per_value_head=True)
KaczmarzLinearAttention = _named("KaczmarzLinearAttention", "kaczmarz", "Kaczmarz Linear Attention: a projection step on raw keys.")
QDelta = _named("QDelta", "qdelta", "Q-Delta: the erase key is k + lambda q.")
Comba = _named("Comba", "decay=scalar gain=gate erase_key=own q_norm=l2 k_norm=l2 erase_state=previous",
               "Comba: an erase before the decay, with a key of its own, and a corrected read.", output_gate="sigmoid", raw_read_correction=True)
PreconditionedDeltaNet = _named("PreconditionedDeltaNet", "precond_deltanet", "DeltaNet with a diagonal preconditioner.", output_gate="none")
PreconditionedGatedDeltaNet = _named("PreconditionedGatedDeltaNet", "precond_gated_deltanet", "Gated DeltaNet with a diagonal preconditioner.")
PreconditionedKDA = _named("PreconditionedKDA", "precond_kda", "Kimi Delta Attention with a diagonal preconditioner.", True, output_gate="sigmoid", decay_per_value_head=True)

from fastweight.torch._published import LonghornDiag, Mamba, Mamba2, Mamba3, Mamba3State, Mesa, RWKV7, _SequenceLayer  # noqa: E402, F401  it takes names of this file
