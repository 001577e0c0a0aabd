#!/usr/bin/env python3
"""tests/conformance/models/lora/: LoRA as PEFT computes it, for `fastweight verify`: a model of a recurrence and an attention layer in
PyTorch, PEFT's adapters on every projection, logits, gradients of the adapters and twenty steps of AdamW, in float64.
Needs PyTorch, safetensors and peft (pip install peft), which neither the program nor its tests do.

    tools/make_lora_conformance.py [FOLDER]   writes FOLDER (tests/conformance/models/lora)
    tools/make_lora_conformance.py --check    computes all again and exits 1 if a value differs by more than 1e-9
    tools/make_lora_conformance.py --read ADAPTERS
                                              PEFT reads a folder of fastweight's for this model; prints the loss of input_ids"""

import json
import pathlib
import sys

import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

HERE = pathlib.Path(__file__).resolve().parent.parent / "tests/conformance/models/lora"
HIDDEN, HEADS, KEY, KV_HEADS, VOCABULARY, MLP, CONV, EPS, THETA = 16, 2, 8, 1, 29, 24, 4, 1e-5, 50.0
RANK, ALPHA, STEPS = 3, 5.0, 20
CONFIG = {
    "model_type": "fastweight",
    "rule": "gated_deltanet",
    "layers": ["recurrent", "attention"],
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_heads": HEADS,
    "head_dim": KEY,
    "intermediate_size": MLP,
    "conv_size": CONV,
    "norm_eps": EPS,
    "tie_word_embeddings": True,
    "mixer": {"attention": {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": KEY, "rope_theta": THETA, "qkv_bias": True}},
}


class Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.weight


class Recurrence(nn.Module):
    """Gated DeltaNet, one token at a time."""

    def __init__(self):
        super().__init__()
        size = HEADS * KEY
        for name in ("q", "k", "v", "g"):
            setattr(self, f"{name}_proj", nn.Linear(HIDDEN, size, bias=False))
        for name in ("a", "b"):
            setattr(self, f"{name}_proj", nn.Linear(HIDDEN, HEADS, bias=False))
        for name in ("q", "k", "v"):
            setattr(self, f"{name}_conv1d", nn.Conv1d(size, size, CONV, groups=size, bias=False))
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(HEADS)), nn.Parameter(torch.zeros(HEADS))
        self.o_norm, self.o_proj = Norm(KEY), nn.Linear(size, HIDDEN, bias=False)

    def forward(self, x):
        batch, tokens, _ = x.shape
        heads = lambda y: y.view(batch, tokens, HEADS, KEY)

        def mixed(name):
            y = getattr(self, f"{name}_proj")(x).transpose(1, 2)
            return heads(F.silu(getattr(self, f"{name}_conv1d")(F.pad(y, (CONV - 1, 0)))).transpose(1, 2))

        unit = lambda y: y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6)
        q, k, v = unit(mixed("q")) * KEY**-0.5, unit(mixed("k")), mixed("v")
        decay = torch.exp(-self.A_log.exp() * F.softplus(self.a_proj(x) + self.dt_bias))
        gain = torch.sigmoid(self.b_proj(x))
        S, out = x.new_zeros(batch, HEADS, KEY, KEY), []
        for t in range(tokens):
            S = S * decay[:, t, :, None, None]
            write = gain[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
            S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], write)
            out.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
        o = self.o_norm(torch.stack(out, 1)) * F.silu(heads(self.g_proj(x)))
        return self.o_proj(o.flatten(2))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * KEY)
        self.k_proj, self.v_proj = nn.Linear(HIDDEN, KV_HEADS * KEY), nn.Linear(HIDDEN, KV_HEADS * KEY)
        self.o_proj = nn.Linear(HEADS * KEY, HIDDEN, bias=False)

    def forward(self, x):
        batch, tokens, _ = x.shape
        angle = torch.arange(tokens, dtype=x.dtype)[:, None] * THETA ** (-torch.arange(0, KEY, 2, dtype=x.dtype) / KEY)
        cos, sin = angle.cos(), angle.sin()

        def turned(y):
            a, b = y.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        heads = lambda y: y.view(batch, tokens, -1, KEY).transpose(1, 2)
        q, k, v = turned(heads(self.q_proj(x))), turned(heads(self.k_proj(x))), heads(self.v_proj(x))
        repeated = lambda y: y.repeat_interleave(HEADS // KV_HEADS, 1)
        o = F.scaled_dot_product_attention(q, repeated(k), repeated(v), is_causal=True)
        return self.o_proj(o.transpose(1, 2).flatten(2))


class Swiglu(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, MLP, bias=False), nn.Linear(HIDDEN, MLP, bias=False)
        self.down_proj = nn.Linear(MLP, HIDDEN, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, mixer):
        super().__init__()
        self.attn_norm, self.attn, self.mlp_norm, self.mlp = Norm(HIDDEN), mixer, Norm(HIDDEN), Swiglu()

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([Block(Recurrence()), Block(Attention())])
        self.norm = Norm(HIDDEN)


class Model(nn.Module):
    prepare_inputs_for_generation = None  # PEFT asks for it where task_type is CAUSAL_LM

    def __init__(self):
        super().__init__()
        self.model = Body()

    def forward(self, ids):
        x = self.model.embeddings(ids)
        for layer in self.model.layers:
            x = layer(x)
        return self.model.norm(x) @ self.model.embeddings.weight.T


def loss_of(model, ids):
    logits = model(ids)
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1)), logits


def drawn(parameter, deviation):
    """Values that float32 holds."""
    parameter.data = (torch.randn(parameter.shape) * deviation).to(parameter.dtype)


def adapters_of(model):
    return {name: p for name, p in model.named_parameters() if "lora_" in name}


def make(folder):
    torch.manual_seed(7)
    base = Model()
    for name, p in base.named_parameters():
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        drawn(p, p.shape[-1] ** -0.5 if p.dim() == 2 else 0.3)
        p.data += mean
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    save_file({name: p.detach().clone() for name, p in base.named_parameters()}, folder / "model.safetensors")
    targets = sorted({name.rsplit(".", 1)[-1] for name, m in base.named_modules() if isinstance(m, nn.Linear)})
    model = PeftModel(base, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, init_lora_weights=False))
    for p in adapters_of(model).values():
        drawn(p, p.shape[1] ** -0.5 if p.shape[0] == RANK else 0.2)
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    adapters = json.loads((folder / "adapter_config.json").read_text()) | {"target_modules": targets}  # PEFT writes a set
    (folder / "adapter_config.json").write_text(json.dumps(adapters, indent=2) + "\n")
    model.double()
    ids = torch.randint(VOCABULARY, (2, 24))
    loss, logits = loss_of(model, ids)
    loss.backward()
    io = {"input_ids": ids, "logits": logits.detach(), "loss": loss.detach()[None]}
    io |= {f"grad/{name.replace('.default', '')}": p.grad.clone() for name, p in adapters_of(model).items()}
    optimizer = torch.optim.AdamW(adapters_of(model).values(), lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    batches, rates = torch.randint(VOCABULARY, (STEPS, 2, 12)), 1e-2 * torch.linspace(1, 0.5, STEPS, dtype=torch.float64)
    losses, norms = [], []
    for batch, rate in zip(batches, rates):
        optimizer.param_groups[0]["lr"] = rate.item()
        optimizer.zero_grad()
        loss, _ = loss_of(model, batch)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(adapters_of(model).values(), 1.0))
        losses.append(loss.detach())
        optimizer.step()
    io |= {"trace/input_ids": batches, "trace/lr": rates, "trace/loss": torch.stack(losses), "trace/norm": torch.stack(norms)}
    save_file(io, folder / "io.safetensors")


def differs(folder):
    for name in ("model.safetensors", "adapter_model.safetensors", "io.safetensors"):
        ours, now = load_file(HERE / name), load_file(folder / name)
        for tensor in sorted(ours.keys() | now.keys()):
            same = tensor in ours and tensor in now and ours[tensor].shape == now[tensor].shape
            if not same or (ours[tensor].double() - now[tensor].double()).abs().max() > 1e-9:
                yield f"{HERE / name}: {tensor} is another now"


def read(folder):
    base = Model()
    base.load_state_dict(load_file(HERE / "model.safetensors"))
    model = PeftModel.from_pretrained(base, folder)
    stored = load_file(pathlib.Path(folder) / "adapter_model.safetensors")
    for name, p in adapters_of(model).items():
        assert torch.equal(p, stored[name.replace(".default", "")]), name
    assert len(stored) == len(adapters_of(model)), "tensors that PEFT did not take"
    print(f"{loss_of(model.double().base_model.model, load_file(HERE / 'io.safetensors')['input_ids'])[0].item():.9f}")


def main():
    if sys.argv[1:2] == ["--read"]:
        return read(sys.argv[2])
    if sys.argv[1:] != ["--check"]:
        return make(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        make(pathlib.Path(folder))
        found = list(differs(pathlib.Path(folder)))
    print("\n".join(found) or "as before")
    return len(found) > 0


if __name__ == "__main__":
    sys.exit(main())
