"""Layers of a model that are no rules (attention, gated convolution), MLPs, norms, the block around them, and the layout of a batch.

Names and shapes of parameters are the engine's. Sizes: B rows of T columns as the caller has them; N sequences of up to L real tokens; d hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from fastweight._library import Error
from fastweight.torch import _layer
from fastweight.torch import nn as layers
from fastweight.torch.nn import DeltaRuleLayer

# Keys of the configuration that are arguments of DeltaRuleLayer under the same name.
_SAME = ("head_dim", "expand_v", "conv_size", "output_gate", "output_gate_rank", "output_gate_bias", "output_norm", "decay_rank", "decay_per_value_head", "decay_gate",
         "feature_map", "rope_theta", "allow_neg_eigval", "precond_x", "precond_gates", "precond_center", "raw_read_correction", "gain_source",
         "gain_factor", "single_gate", "init")


class Layout:
    """Which tokens of a call belong to which sequence. Layers see [B, T, d], or without padding [1, tokens, d] with offsets (packed).

    index: places of the real tokens among B * T, None where all are. offsets: int64 [N + 1] on the CPU, None where not packed.
    """

    def __init__(self, x, mask=None, offsets=None):
        self.rows, self.columns = x.shape[:2]
        self.index = self.offsets = None
        if mask is not None:
            self.index = mask.flatten().nonzero()[:, 0]
            if not len(self.index):
                raise Error("attention_mask: expected at least one token that is not padding, got zeros alone")
            offsets = F.pad(mask.sum(1).cumsum(0), (1, 0))
        if offsets is None:
            self.sequences, self.lengths, self.longest = self.rows, torch.full((self.rows,), self.columns, device=x.device), self.columns
            return
        self.offsets = offsets.to("cpu", torch.int64)
        lengths = self.offsets.diff()
        self.sequences, self.lengths, self.longest = len(lengths), lengths.to(x.device), int(lengths.max())
        sequence = torch.repeat_interleave(torch.arange(self.sequences), lengths)
        place = torch.arange(int(self.offsets[-1])) - self.offsets[sequence]
        self.place = (sequence * self.longest + place).to(x.device)  # of a real token in [N, L]

    def pack(self, x):
        return x if self.index is None else x.flatten(0, 1).index_select(0, self.index)[None]

    def unpack(self, x):
        if self.index is None:
            return x
        return x.new_zeros(self.rows * self.columns, x.shape[-1]).index_copy(0, self.index.to(x.device), x[0]).view(self.rows, self.columns, -1)

    def aligned(self, x):
        """[N, L, ...] of what a layer sees, each sequence from the left, zeros after it."""
        if self.offsets is None:
            return x
        return x.new_zeros(self.sequences * self.longest, *x.shape[2:]).index_copy(0, self.place.to(x.device), x[0]).unflatten(0, (self.sequences, self.longest))

    def back(self, x):
        """The inverse of aligned()."""
        return x if self.offsets is None else x.flatten(0, 1).index_select(0, self.place.to(x.device))[None]

    def positions(self, begin, device):
        """int64 [N, L]: places in the sequences, which have begin [N] tokens already (None: 0); -1 behind their ends."""
        place = torch.arange(self.longest, device=device).expand(self.sequences, -1)
        real = place < self.lengths.to(device)[:, None]
        return torch.where(real, place if begin is None else place + begin.to(device)[:, None], -1)

    def extended(self, x, tail, width):
        """(aligned(x) behind the `width` inputs before it, those inputs for the next call). tail: [N, width, d] or None: zeros."""
        x = self.aligned(x)
        whole = torch.cat([x.new_zeros(self.sequences, width, x.shape[-1]) if tail is None else tail.to(x.dtype), x], 1)
        last = self.lengths.to(x.device)[:, None] + torch.arange(width, device=x.device)
        return whole, whole.gather(1, last[..., None].expand(-1, -1, x.shape[-1]))


class Norm(nn.Module):
    """kind: "rms", "zero_centered_rms" (its weight counts from 1), or "layer", which has a bias."""

    def __init__(self, size, eps, kind="rms"):
        super().__init__()
        self.begin = 1.0 if kind == "zero_centered_rms" else 0.0
        self.eps, self.weight = eps, nn.Parameter(torch.full((size,), 1 - self.begin))
        self.bias = nn.Parameter(torch.zeros(size)) if kind == "layer" else None

    def forward(self, x):
        exact = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        if self.bias is not None:
            exact = exact - exact.mean(-1, keepdim=True)
        y = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps) * (self.weight.to(exact.dtype) + self.begin)
        return (y if self.bias is None else y + self.bias.to(exact.dtype)).to(x.dtype)


class RuleMixer(DeltaRuleLayer):
    """A rule's layer with the model's cache."""

    def __init__(self, config, layer):
        super().__init__(config.hidden_size, config.num_heads, config.layer_kind(layer), num_v_heads=config.num_v_heads or None,
                         norm_eps=config.output_norm_eps or config.norm_eps, **{name: getattr(config, name) for name in _SAME})

    def forward(self, x, layout, lower_bound, cache):
        bound = lower_bound if self.spec.decay_gate == "bounded" else None
        if cache is None:
            return super().forward(x, cu_seqlens=layout.offsets, lower_bound=bound)
        if layout.offsets is None and layout.columns == 1 and cache.state is not None and not torch.is_grad_enabled():
            return self.step(x[:, 0], cache.state, lower_bound=bound)[:, None]
        y, cache.state = super().forward(x, cache.state, cu_seqlens=layout.offsets, output_state=True, lower_bound=bound)
        return y


class PublishedMixer(nn.Module):
    """Of a layer of fastweight.torch.nn that is no rule's: its forward() with the model's layout and cache."""

    def forward(self, x, layout, lower_bound, cache):
        if cache is None:
            return super().forward(x, cu_seqlens=layout.offsets)
        y, cache.state = super().forward(x, cache.state, cu_seqlens=layout.offsets, output_state=True)
        return y


class SelectiveMixer(PublishedMixer, layers.Mamba):
    def __init__(self, config, layer):
        super().__init__(config.hidden_size, init=config.init, **config.layer_keys(layer))


class LonghornMixer(PublishedMixer, layers.LonghornDiag):
    def __init__(self, config, layer):
        super().__init__(config.hidden_size, init=config.init, **config.layer_keys(layer))


class SsdMixer(PublishedMixer, layers.Mamba2):
    def __init__(self, config, layer):
        super().__init__(config.hidden_size, init=config.init, norm_eps=config.norm_eps, **config.layer_keys(layer))


class Mamba3Mixer(PublishedMixer, layers.Mamba3):
    def __init__(self, config, layer):
        super().__init__(config.hidden_size, init=config.init, norm_eps=config.norm_eps, **config.layer_keys(layer))


class MesaMixer(PublishedMixer, layers.Mesa):
    def __init__(self, config, layer):
        keys = config.layer_keys(layer)
        heads, dim = keys.pop("num_heads") or config.num_heads, keys.pop("head_dim") or config.head_dim
        super().__init__(config.hidden_size, heads, head_dim=dim, init=config.init, norm_eps=config.norm_eps, **keys)


class Rwkv7Mixer(layers.RWKV7):
    """The model's first such layer gives its values to those after it."""

    shares_values = True

    def __init__(self, config, layer):
        keys = config.layer_keys(layer)
        dim = keys.pop("head_dim") or config.head_dim
        first = next(i for i in range(config.num_hidden_layers) if config.layer_kind(i) == "rwkv7")
        super().__init__(config.hidden_size, head_dim=dim, norm_eps=config.norm_eps, layer=layer, layers=config.num_hidden_layers, first=layer == first, **keys)

    def forward(self, x, layout, v_first, cache):
        v_first = None if self.first else v_first
        if cache is None:
            return super().forward(x, v_first=v_first, cu_seqlens=layout.offsets)
        y, v_first, cache.state = super().forward(x, cache.state, v_first=v_first, cu_seqlens=layout.offsets, output_state=True)
        return y, v_first


def _seen(position, places, window=0):
    """[N, 1, T, S]: which keys at `places` [N, S] the queries at `position` [N, T] see; -1 are none."""
    behind = position[:, :, None] - places[:, None, :]
    seen = (behind >= 0) & (places >= 0)[:, None]
    if window:
        seen &= behind < window
    seen |= (position < 0)[:, :, None]  # rows behind the end see anything: no row is empty, and none of these is read
    return seen[:, None]


class MlaMixer(nn.Module):
    """Multi-head latent attention without positions; src/nn/mla_mixer.h has the formulas. The cache has one latent row a token, c and the shared keys s.

    What is cached is attended as it lies, as one key head, unless kv_b_proj is another layer than PyTorch's, such as PEFT's.
    """

    def __init__(self, config, layer):
        super().__init__()
        keys, d, self.init = config.layer_keys(layer), config.hidden_size, config.init
        self.heads, self.rank = keys["num_heads"] or config.num_heads, keys["kv_rank"]
        self.key_dim, self.shared_dim, self.value_dim = keys["key_dim"], keys["shared_key_dim"], keys["value_dim"]
        self.q_proj = nn.Linear(d, self.heads * (self.key_dim + self.shared_dim), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(d, self.rank + self.shared_dim, bias=False)
        self.kv_a_layernorm = Norm(self.rank, 1e-6)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.key_dim + self.value_dim), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value_dim, d, bias=False)

    def forward(self, x, layout, lower_bound, cache):
        position = layout.positions(None if cache is None else cache.begin, x.device)
        q = layout.aligned(self.q_proj(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        latent, shared = self.kv_a_proj_with_mqa(x).split([self.rank, self.shared_dim], -1)
        row = layout.aligned(torch.cat([self.kv_a_layernorm(latent), shared], -1))[:, None]  # [N, 1, T, R + S]
        past = cache is not None and cache.k is not None
        places = position
        if cache is not None:
            row, _, places = cache.attend(row, row[..., :0], position, 0)
        mask = _seen(position, places) if past or layout.offsets is not None else None
        attend = lambda q, k, v: F.scaled_dot_product_attention(  # noqa: E731
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=(self.key_dim + self.shared_dim) ** -0.5, enable_gqa=k.shape[1] != self.heads)
        if past and type(self.kv_b_proj) is nn.Linear:
            up_k, up_v = self.kv_b_proj.weight.view(self.heads, -1, self.rank).split([self.key_dim, self.value_dim], 1)
            query = torch.cat([q[..., : self.key_dim] @ up_k, q[..., self.key_dim :]], -1)
            o = attend(query, row, row[..., : self.rank]) @ up_v.transpose(1, 2)
        else:
            k, v = self.kv_b_proj(row[:, 0, :, : self.rank]).unflatten(-1, (self.heads, -1)).transpose(1, 2).split([self.key_dim, self.value_dim], -1)
            o = attend(q, torch.cat([k, row[..., self.rank :].expand(-1, self.heads, -1, -1)], -1), v)
        return self.o_proj(layout.back(o.transpose(1, 2).flatten(2)))


class AttentionMixer(nn.Module):
    """Softmax attention with a rotary embedding: of all tokens before, or with `window` of that many, the token itself among them."""

    def __init__(self, config, layer):
        super().__init__()
        keys, d = config.layer_keys(layer), config.hidden_size
        self.window, self.theta = keys.get("window", 0), keys["rope_theta"]
        self.heads = keys["num_heads"] or config.num_heads
        self.kv_heads, self.dim = keys["num_kv_heads"] or self.heads, keys["head_dim"] or d // self.heads
        if self.heads % self.kv_heads:
            raise Error(f"mixer.{config.layer_kind(layer)}.num_kv_heads: expected a number that divides the {self.heads} query heads, got {self.kv_heads}")
        self.rotated, self.init = round(keys["rope_fraction"] * self.dim), config.init
        for name, heads in (("q_proj", self.heads), ("k_proj", self.kv_heads), ("v_proj", self.kv_heads)):
            self.add_module(name, nn.Linear(d, heads * self.dim, bias=keys["qkv_bias"]))
        if keys["output_gate"]:
            self.g_proj = nn.Linear(d, self.heads * self.dim, bias=keys["qkv_bias"])
        self.qk_norm, self.norm_width, self.gated = keys["qk_norm"], keys["qk_norm_all_heads"], keys["output_gate"]
        if self.qk_norm:
            kind = config.norm if config.norm == "zero_centered_rms" else "rms"
            for name, heads in (("q_norm", self.heads), ("k_norm", self.kv_heads)):
                self.add_module(name, Norm(heads * self.dim if self.norm_width else self.dim, keys["qk_norm_eps"], kind))
        self.o_proj = nn.Linear(self.heads * self.dim, d, bias=False)

    def forward(self, x, layout, lower_bound, cache):
        position = layout.positions(None if cache is None else cache.begin, x.device)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.qk_norm and self.norm_width:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (layout.aligned(t).unflatten(-1, (-1, self.dim)) for t in (q, k, v))
        if self.qk_norm and not self.norm_width:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.transpose(1, 2) for t in (self._rotated(q, position), self._rotated(k, position), v))
        past = cache is not None and cache.k is not None
        places = position
        if cache is not None:
            k, v, places = cache.attend(k, v, position, self.window)
        plain = not past and layout.offsets is None
        window = self.window if not plain or layout.columns > self.window else 0
        if plain and cache is not None and self.window:  # what this call gave; the ring before it is empty
            k, v, places = k[:, :, -layout.columns :], v[:, :, -layout.columns :], position
        if plain and not window:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        elif plain and layout.columns > 2 * window:
            o = self._in_blocks(q, k, v)
        else:
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=_seen(position, places, window), enable_gqa=self.heads != self.kv_heads)
        o = layout.back(o.transpose(1, 2).flatten(2))
        return self.o_proj(o * torch.sigmoid(self.g_proj(x)) if self.gated else o)

    def _rotated(self, x, position):
        if not self.theta:
            return x
        turned = _layer.turned(x[..., : self.rotated], position.clamp(min=0), self.theta)
        return turned if self.rotated == self.dim else torch.cat([turned, x[..., self.rotated :]], -1)

    def _in_blocks(self, q, k, v):
        """Attention of a window: blocks of `window` queries see their own keys and those of the block before."""
        n, _, columns, _ = q.shape
        blocks, w = -(-columns // self.window), self.window
        cut = lambda t: F.pad(t, (0, 0, 0, blocks * w - columns)).unflatten(2, (blocks, w)).transpose(1, 2)  # noqa: E731  [N, blocks, H, w, D]
        two = lambda t: torch.cat([F.pad(t, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1], t], 3)  # noqa: E731
        q, k, v = (t.flatten(0, 1) for t in (cut(q), two(cut(k)), two(cut(v))))
        behind = torch.arange(w, device=q.device)[:, None] + w - torch.arange(2 * w, device=q.device)
        seen = ((behind >= 0) & (behind < w)).expand(blocks, 1, w, 2 * w).clone()
        seen[0, :, :, :w] = False
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen.repeat(n, 1, 1, 1), enable_gqa=self.heads != self.kv_heads)
        return o.unflatten(0, (n, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :columns]


class ConvMixer(nn.Module):
    """x + conv(x) projection(x), with a causal convolution of every channel."""

    def __init__(self, config, layer):
        super().__init__()
        d, self.kernel, self.init = config.hidden_size, config.layer_keys(layer)["kernel"], config.init
        self.conv, self.projection = nn.Conv1d(d, d, self.kernel, groups=d), nn.Linear(d, d)

    def forward(self, x, layout, lower_bound, cache):
        whole, tail = layout.extended(x, None if cache is None else cache.tail, self.kernel - 1)
        if cache is not None:
            cache.tail = tail
        return x + layout.back(self.conv(whole.transpose(1, 2)).transpose(1, 2)) * self.projection(x)


class Swiglu(nn.Module):
    def __init__(self, config, layer, size=None):
        super().__init__()
        d, size, self.init = config.hidden_size, size or config.mlp_size, config.init
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(d, size, bias=False), nn.Linear(d, size, bias=False), nn.Linear(size, d, bias=False)
        self.inputs = 2 * config.num_hidden_layers * size if config.init == "torch" else size  # as the engine draws down_proj

    def forward(self, x, layout, cache):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ChannelMix(nn.Module):
    """relu(key x')^2 value, where x' is x mixed with the token before it."""

    def __init__(self, config, layer):
        super().__init__()
        d, size = config.hidden_size, config.mlp_size
        self.depth = (1 - layer / config.num_hidden_layers) ** 4
        self.x_k, self.key, self.value = nn.Parameter(torch.empty(d)), nn.Linear(d, size, bias=False), nn.Linear(size, d, bias=False)

    def forward(self, x, layout, cache):
        whole, tail = layout.extended(x, None if cache is None else cache.shift, 1)
        if cache is not None:
            cache.shift = tail
        mixed = x + (layout.back(whole[:, :-1]) - x) * self.x_k
        return self.value(F.relu(self.key(mixed)).square())


class _AddLoss(torch.autograd.Function):
    """x, through which `loss` gets the gradient 1."""

    @staticmethod
    def forward(ctx, x, loss):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx, dx.new_ones(())


class Router(nn.Module):
    """The experts of every token and their weights. No nn.Linear, so that PEFT gives it no adapter; the engine has none either."""

    def __init__(self, keys, d, layers):
        super().__init__()
        self.keys, self.layers = keys, layers
        self.weight = nn.Parameter(torch.empty(keys["num_experts"], d))
        if keys["correction_bias"]:
            self.register_buffer("e_score_correction_bias", torch.zeros(keys["num_experts"]))

    def forward(self, x):
        """(chosen [T, k], weights [T, k], load-balancing loss or None) of x [T, d]."""
        keys, exact = self.keys, torch.float64 if x.dtype == torch.float64 else torch.float32
        logits = F.linear(x.to(exact), self.weight.to(exact))
        scores = logits.softmax(-1) if keys["router"] == "softmax" else logits.sigmoid()
        choice = scores.detach()
        if keys["correction_bias"]:
            choice = choice + self.e_score_correction_bias.to(exact)
        if keys["top_groups"] < keys["groups"]:
            groups = choice.unflatten(-1, (keys["groups"], -1))
            best = groups.topk(min(2, groups.shape[-1]), -1).values.sum(-1).sort(dim=-1, descending=True, stable=True).indices[:, : keys["top_groups"]]
            is_open = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(1, best, True)
            choice = groups.masked_fill(~is_open[..., None], -torch.inf).flatten(1)
        chosen = choice.sort(dim=-1, descending=True, stable=True).indices[:, : keys["top_k"]]  # the first of equal ones, as the engine has it
        weights = scores.gather(1, chosen)
        if keys["normalise"]:
            weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if keys["router"] == "sigmoid" else 0))
        loss = None
        if keys["balance"] and self.training:
            share = (scores / scores.sum(-1, keepdim=True)).mean(0)
            rows = torch.bincount(chosen.flatten(), minlength=keys["num_experts"]).to(exact) / len(x)
            loss = keys["balance"] * keys["num_experts"] / self.layers * (rows * share).sum()
        return chosen, weights * keys["scale"], loss


class ExpertStack(nn.Module):
    """The SwiGLUs of all experts, under transformers' names."""

    def __init__(self, keys, d):
        super().__init__()
        size = keys["intermediate_size"]
        self.gate_up_proj = nn.Parameter(torch.empty(keys["num_experts"], 2 * size, d))
        self.down_proj = nn.Parameter(torch.empty(keys["num_experts"], d, size))

    def forward(self, x, chosen, weights):
        gate_up, down, y = self.gate_up_proj.unbind(0), self.down_proj.unbind(0), torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[token], gate_up[expert]).chunk(2, -1)
            y = y.index_add(0, token, F.linear(F.silu(gate) * up * weights[token, place, None].to(x.dtype), down[expert]))
        return y


class Experts(nn.Module):
    """A mixture of experts, of which every token passes top_k, and a shared expert that all pass."""

    def __init__(self, config, layer):
        super().__init__()
        keys, d, self.init = config.experts_keys(), config.hidden_size, config.init
        self.gate = Router(keys, d, config.num_hidden_layers - min(keys["dense_layers"], config.num_hidden_layers))
        self.experts = ExpertStack(keys, d)
        self.shared_expert = Swiglu(config, layer, keys["shared_size"]) if keys["shared_size"] else None
        self.shared_expert_gate = nn.Linear(d, 1, bias=False) if keys["shared_gate"] else None

    def forward(self, x, layout, cache):
        rows = x.flatten(0, 1)
        chosen, weights, loss = self.gate(rows)
        y = self.experts(rows, chosen, weights).view_as(x)
        if self.shared_expert is not None:
            shared = self.shared_expert(x, layout, cache)
            y = y + (shared if self.shared_expert_gate is None else torch.sigmoid(self.shared_expert_gate(x)) * shared)
        return y if loss is None else _AddLoss.apply(y, loss)


class FastweightBlock(GradientCheckpointingLayer):
    """x + mixer(norm(x)), then + MLP(norm(x)); with post_norm of attention x + norm(mixer(x)) and x + norm(MLP(x))."""

    def __init__(self, config, layer):
        super().__init__()
        keys = config.layer_keys(layer)
        mixer = _MIXERS.get(config.layer_kind(layer), RuleMixer)
        self.attn_norm, self.attn = Norm(config.hidden_size, config.norm_eps, config.norm), mixer(config, layer)
        self.mlp, self.post_norm = None, keys.get("post_norm", False)
        if config.mlp_size:
            self.mlp_norm = Norm(config.hidden_size, config.norm_eps, config.norm)
            kind = {"channel_mix": ChannelMix, "experts": Experts}.get(config.mlp, Swiglu)
            if kind is Experts and layer < config.experts_keys()["dense_layers"]:
                kind = Swiglu
            self.mlp = kind(config, layer)

    def forward(self, x, layout, lower_bound=None, cache=None, v_first=None):
        """x; of a layer that shares values (x, v_first)."""
        shares = getattr(self.attn, "shares_values", False)
        h = x if self.post_norm else self.attn_norm(x)
        h = self.attn(h, layout, v_first if shares else lower_bound, cache)
        if shares:
            h, v_first = h
        x = x + (self.attn_norm(h) if self.post_norm else h)
        if self.mlp is not None:
            x = x + (self.mlp_norm(self.mlp(x, layout, cache)) if self.post_norm else self.mlp(self.mlp_norm(x), layout, cache))
        return (x, v_first) if shares else x


_MIXERS = {"attention": AttentionMixer, "window": AttentionMixer, "conv": ConvMixer, "mamba": SelectiveMixer, "longhorn_diag": LonghornMixer, "ssd": SsdMixer,
           "mamba3": Mamba3Mixer, "mesa": MesaMixer, "rwkv7": Rwkv7Mixer, "mla": MlaMixer}


def initialise(module):
    """Draws a module's own parameters that no file gave, by the engine's distributions."""
    for name, parameter in module.named_parameters():
        if getattr(parameter, "_is_hf_initialized", False) or parameter.is_meta:
            continue
        with torch.no_grad():
            _draw(module, name, parameter)


def _draw(module, name, p):
    if isinstance(module, DeltaRuleLayer):
        _layer.initialise(module.spec, name, p)
    elif isinstance(module, layers._SequenceLayer):
        module.draw(name, p)
    elif isinstance(module, Norm):
        p.fill_(0.0 if name == "bias" else 1 - module.begin)
    elif name == "x_k":
        p.copy_(1 - (torch.arange(len(p), dtype=torch.float64) / len(p)) ** module.depth)
    elif isinstance(module, ChannelMix):
        p.zero_() if name == "value.weight" else p.uniform_(-0.5 * p.shape[1] ** -0.5, 0.5 * p.shape[1] ** -0.5)
    elif name.endswith("bias"):
        p.zero_()
    elif name == "conv.weight":
        p.uniform_(-(p.shape[2] ** -0.5), p.shape[2] ** -0.5)
    elif isinstance(module, Experts) and name == "experts.gate_up_proj":
        _layer.projection(module.init, p, p.shape[2], p.shape[1] // 2)
    elif isinstance(module, Experts) and name == "experts.down_proj":
        _layer.projection(module.init, p, p.shape[2], p.shape[1])
    elif "norm" not in name:
        _layer.projection(module.init, p, getattr(module, "inputs", p.shape[1]) if name == "down_proj.weight" else p.shape[1])
