"""fastweight.torch.nn: layers against the engine's models and flash-linear-attention's, packed and cut sequences, steps, gradients, and PyTorch's own machinery around
them; the short convolution."""

import functools
import json
import math
import os
import pathlib
import socket
import struct
import subprocess
import sys
import tempfile
import unittest

import torch
import torch.nn.functional as F
from torch import nn as tnn
from torch.utils.checkpoint import checkpoint

import fastweight.rules
from fastweight import Error
from fastweight.torch import nn
from fastweight.torch._layer import fla_names

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHARED = pathlib.Path(os.environ.get("FASTWEIGHT_SHARED", ROOT.parent / "shared"))
if not SHARED.is_dir():  # a worktree lies one folder deeper
    SHARED = ROOT.parent.parent / "shared"
VECTORS = SHARED / "vectors/models"
PROGRAM = os.environ.get("FASTWEIGHT_PROGRAM")
SHORT = "FASTWEIGHT_SHORT_TESTS" in os.environ
# Options of the engine's configuration that are arguments of the layer under the same name.
OPTIONS = ("conv_size", "output_gate", "output_gate_rank", "output_norm", "decay_rank", "decay_per_value_head", "decay_gate", "feature_map", "rope_theta",
           "allow_neg_eigval", "precond_x", "precond_gates", "precond_center", "raw_read_correction", "gain_source", "gain_factor", "single_gate", "expand_v")
COMPOSITIONS = ["gated_deltanet2_b_only", "precond_exact", "gated_deltanet erase=scalar", "kda write=scalar", "deltanet erase_key=own",
                "decay=channel gain=longhorn feedback=learned read=corrected write=channel"]
ABLATIONS = [
    {"rule": "retnet", "rope_theta": 10000.0, "conv_size": 0}, {"rule": "gated_deltanet", "gain_factor": "1/sqrt(t)"},
    {"rule": "gated_deltanet", "gain_factor": "1/log(t+1)", "output_gate": "sigmoid"}, {"rule": "gated_deltanet", "gain_source": "learned", "output_norm": "width"},
    {"rule": "gated_deltanet", "single_gate": True, "output_gate": "none"}, {"rule": "precond_gated_deltanet", "precond_gates": "tied"},
    {"rule": "precond_kda", "precond_center": "exp"},
    {"rule": "gla", "decay_gate": "logsigmoid", "decay_rank": 4}, {"rule": "kda", "decay_rank": 4, "output_gate_rank": 4, "decay_per_value_head": True},
    {"rule": "hgrn2", "decay_gate": "bounded"}, {"rule": "gated_deltanet", "feature_map": "product"}, {"rule": "linear_attention", "feature_map": "elu"},
    {"rule": "decay=scalar gain=gate erase_key=own q_norm=l2 k_norm=l2", "raw_read_correction": True}, {"rule": "kda", "allow_neg_eigval": True}, {"rule": "gated_deltanet", "expand_v": 2.0, "conv_size": 1}]
CASES = [{"rule": rule} for rule in fastweight.rules.names() + COMPOSITIONS] + ABLATIONS


# Arguments of the layers that do not take (hidden_size, num_heads), at a width of 16.
PUBLISHED = {
    "Mamba": {"state_size": 3}, "LonghornDiag": {"state_size": 3, "dt_rank": 2}, "Mamba2": {"head_dim": 8, "state_size": 4, "num_groups": 2},
    "Mamba3": {"head_dim": 8, "state_size": 6, "mimo_rank": 2}, "RWKV7": {"head_dim": 8, "decay_rank": 3, "rate_rank": 2, "value_rank": 2, "gate_rank": 2},
}


class Rwkv7Pair(tnn.Module):
    """The first layer and one that takes its values."""

    def __init__(self):
        super().__init__()
        self.layers = tnn.ModuleList([nn.RWKV7(16, **PUBLISHED["RWKV7"], layer=i, layers=2) for i in range(2)])

    def forward(self, x, **options):
        y, values, *first = self.layers[0](x, **options)
        y, _, *second = self.layers[1](y, v_first=values, **options)
        if not second:
            return y
        state = second[0]
        # Not _replace: torch 2.6 compiles constructors of named tuples, but no methods of theirs.
        return y, nn.LayerState(first[0].recurrent + state.recurrent, state.conv, state.precond, state.tokens)


def every_layer():
    """(name, layer) of every class of fastweight.torch.nn."""
    for name in nn.__all__:
        kind = getattr(nn, name)
        if not isinstance(kind, type) or not issubclass(kind, tnn.Module):
            continue
        torch.manual_seed(1)
        layer = Rwkv7Pair() if name == "RWKV7" else kind(16, **PUBLISHED[name]) if name in PUBLISHED else kind(16, 2)
        with torch.no_grad():  # so that no gradient is zero
            for parameter in layer.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        yield name, layer


def read_safetensors(path):
    data = pathlib.Path(path).read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    kinds = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32}
    out = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            out[name] = torch.frombuffer(bytearray(body[begin:end]) or bytearray(8), dtype=kinds[entry["dtype"]], count=math.prod(entry["shape"])).reshape(entry["shape"])
    return out


def write_safetensors(path, tensors):
    header, parts, at = {}, [], 0
    for name, tensor in tensors.items():
        values = tensor.detach().float().contiguous().numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + len(values)]}
        parts.append(values)
        at += len(values)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


class Norm(tnn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = tnn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Block(tnn.Module):
    def __init__(self, layer, width, inner, eps):
        super().__init__()
        self.attn_norm, self.attn, self.mlp_norm, self.mlp = Norm(width, eps), layer, Norm(width, eps), tnn.Module()
        for name, sizes in (("gate_proj", (width, inner)), ("up_proj", (width, inner)), ("down_proj", (inner, width))):
            self.mlp.add_module(name, tnn.Linear(*sizes, bias=False))

    def forward(self, x, **bound):
        x = x + self.attn(self.attn_norm(x), **bound)
        h = self.mlp_norm(x)
        return x + self.mlp.down_proj(F.silu(self.mlp.gate_proj(h)) * self.mlp.up_proj(h))


class Model(tnn.Module):
    """The engine's language model around layers of fastweight.torch.nn."""

    def __init__(self, make_layer, layers, width, vocab, inner, eps, bounds=None, tied=True):
        super().__init__()
        self.model = tnn.Module()
        self.model.embeddings = tnn.Embedding(vocab, width)
        if bounds:
            self.model.lower_bounds = tnn.Parameter(torch.zeros(bounds))
        self.model.layers = tnn.ModuleList([Block(make_layer(), width, inner, eps) for _ in range(layers)])
        self.model.norm = Norm(width, eps)
        if not tied:
            self.lm_head = tnn.Linear(width, vocab, bias=False)
        self.tied = tied

    def forward(self, ids):
        x = self.model.embeddings(ids)
        bounds = getattr(self.model, "lower_bounds", None)
        shares = None if bounds is None else bounds.softmax(0)
        for i, block in enumerate(self.model.layers):
            x = block(x, **({} if bounds is None else {"lower_bound": shares[1 : i + 1].sum(0)}))
        x = self.model.norm(x)
        return F.linear(x, self.model.embeddings.weight if self.tied else self.lm_head.weight)


def ready(value):
    return str(value).lower() if isinstance(value, bool) else str(value)


@unittest.skipUnless(PROGRAM, "FASTWEIGHT_PROGRAM: not given")
class Engine(unittest.TestCase):
    """A folder that the engine made opens in a model of these layers, and one with these layers' weights opens in the engine: the same loss."""

    WIDTH, HEADS, DIM, LAYERS = 24, 2, 8, 2

    def run_program(self, *arguments):
        done = subprocess.run([PROGRAM, *arguments, "--threads", "1"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def nll(self, folder, text):
        return json.loads(self.run_program("eval", folder, "--text", text, "--context", "0", "--json"))["results"][0]["nll"]

    def test_every_rule_there_and_back(self):
        torch.manual_seed(3)
        with tempfile.TemporaryDirectory() as folder:
            text = f"{folder}/text.txt"
            pathlib.Path(text).write_text("".join(f"{i} and {i * i % 97} is {'abc'[i % 3]}; " for i in range(60)))
            ids = torch.tensor(list(pathlib.Path(text).read_bytes()))[None]
            for number, options in enumerate(CASES):
                for v_heads in (0, 4) if number % 4 == 3 else (0,):
                    with self.subTest(**options, v_heads=v_heads):
                        self.there_and_back(f"{folder}/{number}-{v_heads}", text, ids, options, v_heads)

    def there_and_back(self, run, text, ids, options, v_heads):
        flags = [word for name, value in options.items() for word in ([f"--{name.replace('_', '-')}"] if value is True else [f"--{name.replace('_', '-')}", ready(value)])]
        self.run_program("train", "--text", text, "--steps", "2", "--batch", "2", "--length", "32", "--out", run, "--hidden-size", str(self.WIDTH), "--num-heads",
                         str(self.HEADS), "--head-dim", str(self.DIM), "--num-hidden-layers", str(self.LAYERS), "--num-v-heads", str(v_heads), "--lr", "0.02", *flags)
        config, weights = json.loads(pathlib.Path(f"{run}/model/config.json").read_text()), read_safetensors(f"{run}/model/model.safetensors")
        bounds = tuple(weights["model.lower_bounds"].shape) if "model.lower_bounds" in weights else None
        given = {name: config[name] for name in OPTIONS if name in config}
        layer = lambda: nn.DeltaRuleLayer(self.WIDTH, self.HEADS, config["rule"], head_dim=self.DIM, num_v_heads=v_heads or None, norm_eps=config["norm_eps"], **given)  # noqa: E731
        model = Model(layer, self.LAYERS, self.WIDTH, 256, weights["model.layers.0.mlp.down_proj.weight"].shape[1], config["norm_eps"], bounds)
        model.load_state_dict(weights, strict=True)
        self.same_loss(model, ids, f"{run}/model", text)
        # Other weights, in every parameter, of a size that shows.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * (0.1 if options["rule"] == "dplr" else 0.3))  # dplr's steps may grow
        write_safetensors(f"{run}/model/model.safetensors", {name: model.state_dict()[name] for name in weights})
        self.same_loss(model, ids, f"{run}/model", text)

    def same_loss(self, model, ids, folder, text):
        with torch.no_grad():
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits[0].double(), ids[0, 1:], reduction="sum").item()
        self.assertAlmostEqual(self.nll(folder, text) / loss, 1, delta=3e-6)


@unittest.skipUnless(VECTORS.is_dir(), f"{VECTORS}: not there")
class FlaModels(unittest.TestCase):
    """Models of flash-linear-attention under its names: its logits, computed in float64."""

    def layer(self, config):
        """(class, options) of a model's layers; (None, None) for layers that are no rule's."""
        kind, override = config["model_type"], config.get("mixer_override")
        o = {"num_v_heads": config.get("num_v_heads"), "norm_eps": config["norm_eps"], "expand_v": config.get("expand_v", 1), "num_heads": config.get("num_heads")}
        if config.get("head_dim"):
            o["head_dim"] = config["head_dim"]
        elif "expand_k" in config:
            o["head_dim"] = round(config["hidden_size"] * config["expand_k"]) // config["num_heads"]
            o["expand_v"] = config["expand_v"] / config["expand_k"]
        if override:
            return nn.GatedDeltaNet2, dict(o, **{name: override[name] for name in ("num_heads", "num_v_heads", "head_dim", "expand_v", "allow_neg_eigval") if name in override})
        # Values of comba are FLA's plain recurrence's, which erases after the decay; its kernels, and so models, erase before it.
        comba = functools.partial(nn.DeltaRuleLayer, rule="decay=scalar gain=gate erase_key=own q_norm=l2 k_norm=l2", output_gate="sigmoid", raw_read_correction=True)
        layers = {"gated_deltanet": nn.GatedDeltaNet, "kda": nn.KimiDeltaAttention, "precond_kda": nn.PreconditionedKDA, "delta_net": nn.DeltaNet, "comba": comba,
                  "precond_gated_deltanet": nn.PreconditionedGatedDeltaNet, "gla": nn.GatedLinearAttention, "retnet": nn.RetNet, "linear_attn": nn.LinearAttention}
        if kind not in layers:
            return None, None
        if config.get("use_gate"):
            o["output_gate"] = "silu"
        return layers[kind], dict(o, **({"allow_neg_eigval": True} if config.get("allow_neg_eigval") else {}))

    def test_logits_of_every_model_of_one_layer_type(self):
        run = 0
        for folder in sorted(VECTORS.iterdir()):
            config = json.loads((folder / "config.json").read_text())
            layer, options = self.layer(config)
            if layer is None or config.get("attn"):
                continue
            with self.subTest(model=folder.name):
                weights, io = read_safetensors(folder / "model.safetensors"), read_safetensors(folder / "io.safetensors")
                prefix = next(name for name in weights if name.endswith("mlp.down_proj.weight"))
                model = Model(lambda: layer(config["hidden_size"], **options), config["num_hidden_layers"], config["hidden_size"], config["vocab_size"],
                              weights[prefix].shape[1], config["norm_eps"], tied="lm_head.weight" not in weights)
                shapes = {name: t.shape for name, t in model.state_dict().items()}
                model.load_state_dict({name: t.reshape(shapes.get(name, t.shape)) for name, t in weights.items()}, strict=True)
                model.double()
                logits = model(io["input_ids"])
                want = io["logits"].double()
                self.assertLess(((logits - want).norm() / want.norm()).item(), 1e-6)
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), io["input_ids"][:, 1:].flatten().long())
                loss.backward()
                names = list(fla_names(model.model.layers[0].attn.spec))
                whole = math.sqrt(sum(float(t.double().square().sum()) for name, t in io.items() if name.startswith("grad/")))
                for name, parameter in model.named_parameters():
                    theirs = next(n for n in (name, *[name.replace(f".{ours}.", f".{other}.") for other, ours in names]) if f"grad/{n}" in io)
                    want = io[f"grad/{theirs}"].double().reshape(parameter.shape)
                    self.assertLess(float((parameter.grad - want).norm()) / max(float(want.norm()), 1e-3 * whole), 1e-5, name)
                run += 1
        self.assertGreaterEqual(run, 14)


class Layers(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)

    def close(self, a, b, tolerance=2e-5):
        self.assertLess((a - b).abs().max().item(), tolerance)

    def test_cut_packed_and_stepped_every_case_gives_the_same(self):
        x, offsets = torch.randn(2, 9, 16), torch.tensor([0, 9, 9, 18])
        for options in CASES:
            for v_heads in (2, 4):
                with self.subTest(**options, v_heads=v_heads):
                    layer = nn.DeltaRuleLayer(16, 2, num_v_heads=v_heads, **options)
                    y, state = layer(x, output_state=True)
                    first, middle = layer(x[:, :4], output_state=True)
                    second, last = layer(x[:, 4:], middle, output_state=True)
                    self.close(torch.cat([first, second], 1), y)
                    for a, b in zip(last, state):
                        if b is not None:
                            self.close(a, b)
                    packed, states = layer(x.reshape(1, 18, 16), cu_seqlens=offsets, output_state=True)
                    self.close(packed.reshape(2, 9, 16), y)
                    self.close(states.recurrent[[0, 2]], state.recurrent)
                    self.assertEqual(states.tokens.tolist(), [9, 0, 9])
                    stepped = layer.new_state(2)
                    self.close(torch.stack([layer.step(x[:, t], stepped) for t in range(9)], 1), y)
                    for a, b in zip(stepped, state):
                        if b is not None:
                            self.close(a, b)
                    y.sum().backward()
                    self.assertEqual([name for name, p in layer.named_parameters() if p.grad is None], [])

    def published(self):
        """(layer, its forward() as a function of x, state and v_first with or without a state, whether it takes v_first)."""
        low = {"head_dim": 8, "decay_rank": 3, "rate_rank": 2, "value_rank": 2, "gate_rank": 2}
        for layer in (nn.Mamba(16, state_size=3), nn.LonghornDiag(16, state_size=3, dt_rank=2, conv_size=1), nn.Mamba2(16, head_dim=8, state_size=4, num_groups=2),
                      nn.Mamba3(16, head_dim=8, state_size=6), nn.Mamba3(16, head_dim=8, state_size=5, rotation="pairs", mimo_rank=2, num_groups=2, output_norm=True,
                                                                         decay_activation="heavy_tail", decay_floor=0.3),
                      nn.Mesa(16, 2, head_dim=4, output_gate="silu"), nn.Mesa(16, 2, conv_size=1), nn.Mesa(16, 2, head_dim=4, cg_steps=8, cg_tolerance=0), nn.RWKV7(16, **low), nn.RWKV7(16, **low, layer=1, layers=3, key_eps=1e-6)):
            layer.double()
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.2)
            rwkv = isinstance(layer, nn.RWKV7)

            def call(x, state=None, v_first=None, layer=layer, rwkv=rwkv, **options):
                if not rwkv:
                    return layer(x, state, **options)
                y, values, *rest = layer(x, state, v_first=v_first, **options)
                return (y, *rest) if rest else y

            yield layer, call, rwkv and not layer.first

    def test_published_layers_cut_packed_and_stepped_give_the_same(self):
        x, offsets = torch.randn(2, 9, 16, dtype=torch.float64), torch.tensor([0, 9, 9, 18])
        for layer, call, takes_values in self.published():
            values = torch.randn(2, 9, 16, dtype=torch.float64) if takes_values else None
            part = lambda begin, end: None if values is None else values[:, begin:end]  # noqa: B023, E731
            with self.subTest(layer=layer):
                y, state = call(x, None, values, output_state=True)
                self.close(call(x, None, values), y, 1e-12)
                first, middle = call(x[:, :4], None, part(0, 4), output_state=True)
                second, last = call(x[:, 4:], middle, part(4, 9), output_state=True)
                self.close(torch.cat([first, second], 1), y, 1e-10)
                packed, states = call(x.reshape(1, 18, 16), None, None if values is None else values.reshape(1, 18, 16), cu_seqlens=offsets, output_state=True)
                self.close(packed.reshape(2, 9, 16), y, 1e-10)
                again, _ = call(x.reshape(1, 18, 16), states, None if values is None else values.reshape(1, 18, 16), cu_seqlens=offsets, output_state=True)
                self.close(again.reshape(2, 9, 16), call(x, state, values), 1e-10)
                stepped = layer.new_state(2, dtype=torch.float64)
                steps = [layer.step(x[:, t], stepped, **({"v_first": values[:, t]} if takes_values else {})) for t in range(9)]
                self.close(torch.stack([step[0] if isinstance(step, tuple) else step for step in steps], 1), y, 1e-10)
                self.assertEqual(states.tokens.tolist(), [9, 0, 9])
                for a, b, c, d in zip(state, last, states, stepped):
                    if a is not None:
                        self.close(b, a, 1e-10)
                        self.close(c[[0, 2]], a, 1e-10)
                        self.close(d, a, 1e-10)

    def test_a_state_of_a_call_with_gradients_is_stepped(self):
        for name, layer in every_layer():
            if name == "RWKV7":
                continue
            with self.subTest(layer=name):
                x = torch.randn(2, 7, 16)
                _, state = layer(x[:, :6], output_state=True)
                self.close(layer.step(x[:, 6], state), layer(x)[:, 6], 1e-4)

    def test_no_tokens(self):
        layer = nn.Mesa(16, 2)
        y, state = layer(torch.randn(1, 0, 16), output_state=True)
        self.assertEqual((y.shape, state.recurrent.shape[0]), ((1, 0, 16), 1))

    def test_published_layers_gradients_and_weights(self):
        for layer, call, takes_values in self.published():
            with self.subTest(layer=layer):
                x = torch.randn(1, 4, 16, dtype=torch.float64, requires_grad=True)
                values = torch.randn(1, 4, 16, dtype=torch.float64) if takes_values else None
                self.assertTrue(torch.autograd.gradcheck(lambda x, *_: call(x, None, values), (x, *layer.parameters()), fast_mode=True))  # noqa: B023
                with torch.no_grad():
                    want = call(x, None, values)
                    weights = {name: t.clone() for name, t in layer.state_dict().items()}
                    layer.reset_parameters()
                    self.assertGreater((call(x, None, values) - want).abs().max(), 1e-3)
                    layer.load_state_dict(weights, strict=True)
                    self.assertTrue(torch.equal(call(x, None, values), want))

    def test_conjugate_gradients_come_to_the_exact_solve(self):
        x, exact = torch.randn(2, 9, 16, dtype=torch.float64), nn.Mesa(16, 2, dtype=torch.float64)
        for steps, tolerance, error in ((30, 1e-13, 1e-11), (30, 1e-4, 1e-3), (2, 0, 1)):
            layer = nn.Mesa(16, 2, cg_steps=steps, cg_tolerance=tolerance, dtype=torch.float64)
            layer.load_state_dict(exact.state_dict())
            with torch.no_grad():
                found = (layer(x) - exact(x)).norm() / exact(x).norm()
            self.assertLess(found, error)
            if tolerance != 1e-13:
                self.assertGreater(found, 1e-9)

    def test_published_layers_name_what_is_wrong(self):
        for pattern, call in (
            ("head_dim: expected a divisor of expand . hidden_size = 32, got 5", lambda: nn.Mamba2(16, head_dim=5)),
            ("num_groups: expected a divisor of the 4 heads, got 3", lambda: nn.Mamba3(16, head_dim=8, num_groups=3)),
            ("rotation: expected one of auto, pairs, halves, got 'none'", lambda: nn.Mamba3(16, head_dim=8, rotation="none")),
            ("rope_fraction: expected", lambda: nn.Mamba3(16, head_dim=8, rope_fraction=0.0)),
            ("output_gate: expected one of none, silu, sigmoid, got 'x'", lambda: nn.Mesa(16, 2, output_gate="x")),
            ("cg_tolerance: expected a number from 0 to below 1, got 1", lambda: nn.Mesa(16, 2, cg_tolerance=1)),
            ("v_first: expected what the first layer gave, got None", lambda: nn.RWKV7(16, head_dim=8, layer=1, layers=2)(torch.randn(1, 2, 16))),
            (r"hidden_states: expected \[B, T, 16\], got shape \[1, 2, 8\]", lambda: nn.Mamba(16)(torch.randn(1, 2, 8))),
            ("state_size: expected a whole number from 1, got 0", lambda: nn.Mamba(16, state_size=0)),
        ):
            with self.subTest(pattern=pattern), self.assertRaisesRegex(Error, pattern):
                call()

    def test_gradients_against_finite_differences_in_float64(self):
        for options in ({"rule": "gated_deltanet"}, {"rule": "kda", "decay_rank": 2, "output_gate_rank": 2}, {"rule": "comba"}, {"rule": "precond_kda"}, {"rule": "dplr"},
                        {"rule": "gated_deltanet2", "allow_neg_eigval": True}, {"rule": "qdelta"}, {"rule": "retnet", "rope_theta": 100.0, "feature_map": "silu"}):
            with self.subTest(**options):
                layer = nn.DeltaRuleLayer(6, 1, head_dim=4, num_v_heads=2, **options).double()
                x, offsets = torch.randn(1, 5, 6, dtype=torch.float64, requires_grad=True), torch.tensor([0, 2, 5])
                before = layer.new_state(2, dtype=torch.float64)
                before = before._replace(recurrent=torch.randn_like(before.recurrent).requires_grad_(), conv=torch.randn_like(before.conv).requires_grad_())
                parameters = dict(layer.named_parameters())

                def run(x, recurrent, conv, *values):
                    state = before._replace(recurrent=recurrent, conv=conv)
                    y, after = torch.func.functional_call(layer, dict(zip(parameters, values)), (x, state), {"cu_seqlens": offsets, "output_state": True})
                    return y, after.recurrent, after.conv

                self.assertTrue(torch.autograd.gradcheck(run, (x, before.recurrent, before.conv, *parameters.values()), eps=1e-6, atol=1e-6, rtol=1e-4, nondet_tol=0.0))

    def test_named_classes_say_their_rule(self):
        for name in nn.__all__:
            layer = getattr(nn, name)
            if isinstance(layer, type) and issubclass(layer, nn.DeltaRuleLayer) and layer is not nn.DeltaRuleLayer:
                with self.subTest(name=name):
                    self.assertEqual(layer(16, 2)(torch.randn(1, 3, 16)).shape, (1, 3, 16))
                    self.assertIn(">>>", layer.__doc__)

    def test_initial_values_are_the_engines_distributions(self):
        layer = nn.KimiDeltaAttention(256, 8)
        dt = F.softplus(layer.dt_bias)
        self.assertTrue(bool((dt >= 0.9e-3).all() and (dt <= 0.101).all()))
        self.assertTrue(bool((layer.A_log.exp() >= 0.99).all() and (layer.A_log.exp() <= 16.1).all()))
        self.assertAlmostEqual(layer.q_proj.weight.std().item(), 2**-2.5 * math.sqrt(6 / 512) / math.sqrt(3), delta=3e-4)
        self.assertLessEqual(layer.v_conv1d.weight.abs().max().item(), 0.5)

    def test_autocast(self):
        for name, layer in every_layer():
            with self.subTest(layer=name):
                x = torch.randn(2, 12, 16, requires_grad=True)
                want, (slope,) = layer(x), torch.autograd.grad(layer(x).sum(), x)
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    y, state = layer(x, output_state=True)
                self.assertEqual((y.dtype, state.recurrent.dtype), (torch.bfloat16, torch.float32))
                y.float().sum().backward()
                self.assertLess(((y - want).norm() / want.norm()).item(), 3e-2)
                self.assertLess(((x.grad - slope).norm() / slope.norm()).item(), 6e-2)
                self.assertEqual([name for name, p in layer.named_parameters() if p.grad is None or p.grad.dtype != torch.float32], [])

    def test_bfloat16_and_meta(self):
        layer = nn.KimiDeltaAttention(32, 2, dtype=torch.bfloat16)
        self.assertEqual(layer(torch.randn(1, 4, 32, dtype=torch.bfloat16)).dtype, torch.bfloat16)
        empty = nn.GatedDeltaNet(32, 2, device="meta").to_empty(device="cpu")
        empty.reset_parameters()
        self.assertTrue(bool(torch.isfinite(empty(torch.randn(1, 4, 32))).all()))

    def test_compile_is_one_graph(self):
        """Through AOTAutograd those whose operations differ; it takes most of the time."""
        offsets = torch.tensor([0, 7, 16])
        for name, layer in every_layer():
            whole = name in ("GatedDeltaNet", "KimiDeltaAttention", "Mamba", "Mamba3", "Mesa", "RWKV7")
            if SHORT and not whole:
                continue
            with self.subTest(layer=name):
                torch._dynamo.reset()
                x = torch.randn(1, 16, 16, requires_grad=True)

                def run(x):
                    y, state = layer(x, cu_seqlens=offsets, output_state=True)  # noqa: B023
                    return y.sum() + state.recurrent.square().sum()

                want = torch.autograd.grad(run(x), [x, *layer.parameters()])
                compiled = torch.compile(run, fullgraph=True, backend="aot_eager" if whole else "eager")
                for a, b in zip(torch.autograd.grad(compiled(x), [x, *layer.parameters()]), want):
                    self.close(a, b, 1e-5 * max(b.abs().max().item(), 1))

    def test_checkpointing(self):
        for name, layer in every_layer():
            with self.subTest(layer=name):
                x = torch.randn(2, 8, 16, requires_grad=True)
                want = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
                again = checkpoint(layer, x, use_reentrant=False)
                for a, b in zip(torch.autograd.grad(again.square().sum(), [x, *layer.parameters()]), want):
                    self.assertTrue(torch.equal(a, b))

    def test_values_are_checked_where_it_is_asked_for(self):
        with self.assertRaisesRegex(Error, "q: expected finite numbers, got nan"):
            nn.GatedDeltaNet(16, 2, check=True)(torch.full((1, 4, 16), math.nan))

    def test_arguments_are_checked(self):
        for pattern, call in (
            ("num_v_heads: expected a multiple of num_heads = 2, got 3", lambda: nn.DeltaRuleLayer(16, 2, num_v_heads=3)),
            ("head_dim: expected a number, since num_heads = 3 does not divide", lambda: nn.DeltaRuleLayer(16, 3)),
            ("output_gate: expected one of silu, sigmoid, none, got 'tanh'", lambda: nn.DeltaRuleLayer(16, 2, output_gate="tanh")),
            ("expand_v: expected expand_v \\* head_dim to be whole", lambda: nn.DeltaRuleLayer(16, 2, expand_v=0.3)),
            ("conv_size: expected 0 to 256, got 300", lambda: nn.DeltaRuleLayer(16, 2, conv_size=300)),
            ("rope_theta: expected 0, since head_dim = 5 is odd", lambda: nn.DeltaRuleLayer(16, 2, head_dim=5, rope_theta=10.0)),
            ("single_gate: expected a rule with decay=scalar", lambda: nn.DeltaRuleLayer(16, 2, "kda", single_gate=True)),
            ("precond_gates: expected own", lambda: nn.DeltaRuleLayer(16, 2, "precond_kda", precond_gates="tied")),
            ("precond_center: expected parameter", lambda: nn.DeltaRuleLayer(16, 2, "kda", precond_center="exp")),
            ("raw_read_correction: expected False, because the rule", lambda: nn.DeltaRuleLayer(16, 2, "comba", raw_read_correction=True)),
            ("rule: ", lambda: nn.DeltaRuleLayer(16, 2, "no_such_rule")),
            ("hidden_states: expected \\[B, T, 16\\], got shape \\[1, 3, 15\\]", lambda: nn.GatedDeltaNet(16, 2)(torch.randn(1, 3, 15))),
            ("hidden_states: expected \\[N, 16\\]", lambda: nn.GatedDeltaNet(16, 2).step(torch.randn(1, 3, 16), None)),
            ("weight: expected \\[D, W\\]", lambda: nn.short_conv(torch.randn(1, 3, 4), torch.randn(3, 4))),
            ("x: expected a floating-point tensor of 3 dimensions, got torch.int64", lambda: nn.short_conv(torch.ones(1, 3, 4).long(), torch.randn(4, 4))),
            ("initial_state: shape: expected \\[1, 3, 4\\], got \\[1, 2, 4\\]", lambda: nn.short_conv(torch.randn(1, 3, 4), torch.randn(4, 4), None, torch.zeros(1, 2, 4))),
            ("short_conv_step: expected tensors without gradients", lambda: nn.short_conv_step(torch.randn(1, 4), torch.randn(4, 4, requires_grad=True), torch.zeros(1, 3, 4))),
        ):
            with self.subTest(pattern=pattern), self.assertRaisesRegex(Error, pattern):
                call()


class ShortConv(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(1)

    @staticmethod
    def formula(x, weight, bias, before):
        whole = torch.cat([before, x], 1)
        return F.silu(F.conv1d(whole.transpose(1, 2), weight[:, None], bias, groups=weight.shape[0])).transpose(1, 2)

    def test_values_types_and_views(self):
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
            for width in (1, 2, 4):
                with self.subTest(dtype=dtype, width=width):
                    wide = torch.randn(2, 7, 12).to(dtype)
                    x, weight, bias, before = wide[..., 2:8], torch.randn(6, width).to(dtype), torch.randn(6).to(dtype), torch.randn(2, width - 1, 6).to(dtype)
                    y, state = nn.short_conv(x, weight, bias, before, output_final_state=True)
                    self.assertEqual((y.dtype, state.dtype), (dtype, dtype))
                    want = self.formula(x.double(), weight.double(), bias.double(), before.double())
                    self.assertLess((y.double() - want).abs().max().item() / want.abs().max().item(), tolerance)
                    self.assertTrue(torch.equal(state, torch.cat([before, x], 1)[:, x.shape[1] :]))
                    turned = nn.short_conv(x.transpose(0, 1).contiguous().transpose(0, 1), weight, bias, before)[0]
                    self.assertTrue(torch.equal(turned, y))

    def test_packed_is_each_alone_and_short_sequences_keep_their_state(self):
        x, weight, offsets = torch.randn(1, 9, 5), torch.randn(5, 4), torch.tensor([0, 1, 1, 6, 9], dtype=torch.int32)
        before = torch.randn(4, 3, 5)
        for tracked in (False, True):
            y, state = nn.short_conv(x.clone().requires_grad_(tracked), weight, None, before, output_final_state=True, cu_seqlens=offsets)
            for n in range(4):
                begin, end = offsets[n], offsets[n + 1]
                alone, own = nn.short_conv(x[:, begin:end], weight, None, before[n : n + 1], output_final_state=True)
                self.assertTrue(torch.equal(y[:, begin:end], alone))
                self.assertTrue(torch.equal(state[n : n + 1], own))

    def test_gradients(self):
        x, weight, bias, offsets = torch.randn(1, 6, 3).double(), torch.randn(3, 4).double(), torch.randn(3).double(), torch.tensor([0, 1, 6])
        before = torch.randn(2, 3, 3).double()
        run = lambda *a: nn.short_conv(*a, output_final_state=True, cu_seqlens=offsets)  # noqa: E731
        self.assertTrue(torch.autograd.gradcheck(run, [t.requires_grad_() for t in (x, weight, bias, before)]))
        batch = torch.randn(2, 2, 3).double().requires_grad_()
        self.assertTrue(torch.autograd.gradcheck(lambda *a: nn.short_conv(*a, output_final_state=True), (batch, weight, bias, before)))

    def test_operators_pass_torchs_own_check(self):
        x, weight, bias = (t.requires_grad_() for t in (torch.randn(2, 5, 3), torch.randn(3, 4), torch.randn(3)))
        torch.library.opcheck(torch.ops.fastweight.short_conv.default, (x, weight, bias, torch.randn(2, 3, 3), None, 0, True))
        torch.library.opcheck(torch.ops.fastweight.short_conv_step_.default, (torch.randn(2, 1, 3), torch.randn(3, 4), None, torch.randn(2, 3, 3)))

    def test_second_derivatives_are_refused(self):
        x, weight = torch.randn(1, 5, 3, requires_grad=True), torch.randn(3, 4, requires_grad=True)
        (d,) = torch.autograd.grad(nn.short_conv(x, weight)[0].sum(), x, create_graph=True)
        with self.assertRaisesRegex(RuntimeError, "second derivatives"):
            d.sum().backward()

    def test_forward_mode_is_refused(self):
        weight = torch.randn(3, 4)
        with self.assertRaisesRegex(RuntimeError, "derivatives in forward mode"):
            torch.func.jvp(lambda x: nn.short_conv(x, weight)[0], (torch.randn(1, 5, 3),), (torch.randn(1, 5, 3),))


# Threads of Gloo outlive destroy_process_group, as DDP's reducer and DTensor's caches refer to their group. One that
# releases a tensor while the interpreter ends waits for its lock, is ended by force and aborts the process ("terminate
# called without an active exception"): hence os._exit.
WORKER = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from test_nn import every_layer
rank, port, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
names, layers = zip(*every_layer())
layers = torch.nn.ModuleList(layers)
x = torch.randn(4, 6, 16)

class Sum(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return sum(layer(x).square().mean() for layer in self.layers)

whole = Sum()
whole(x).backward()
want = {name: p.grad.clone() for name, p in whole.named_parameters()}
whole.zero_grad()
if kind == "ddp":
    run = DistributedDataParallel(whole)
else:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh
    mesh = init_device_mesh("cpu", (2,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    run = fully_shard(whole, mesh=mesh)
run(x[2 * rank : 2 * rank + 2]).backward()
for name, p in whole.named_parameters():
    grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
    where = names[int(name.split(".")[1])], name
    assert want[name].abs().max() > 0, where
    assert torch.allclose(grad, want[name], atol=1e-5, rtol=1e-4), (where, (grad - want[name]).abs().max())
dist.destroy_process_group()
print("same gradients", flush=True)
os._exit(0)
"""


class TwoProcesses(unittest.TestCase):
    def run_both(self, kind):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        both = [subprocess.Popen([sys.executable, "-W", "ignore", "-c", WORKER, str(rank), port, kind], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                 cwd=pathlib.Path(__file__).parent) for rank in range(2)]
        for process in both:
            out = process.communicate(timeout=300)[0]
            self.assertEqual(process.returncode, 0, out)
            self.assertIn("same gradients", out)

    def test_ddp(self):
        self.run_both("ddp")

    @unittest.skipUnless(hasattr(torch.cpu.Stream(), "record_event"), "this torch's FSDP2 does not run on the CPU")
    def test_fsdp2(self):
        self.run_both("fsdp2")


if __name__ == "__main__":
    unittest.main()
