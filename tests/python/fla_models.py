"""Small random models of flash-linear-attention of every type that the program imports, saved in shards, imported, and asked for tokens there: fla_models.py FOLDER
[TYPE...] prints a JSON line a type. A program of its own for test_convert.py: its kernels in Triton run on the CPU in Triton's interpreter, which a process is in from its
beginning or never. Recurrences are these kernels' (fastweight.fla), convolutions, norms and gates FLA's own."""

import inspect
import json
import os
import pathlib
import subprocess
import sys
import textwrap
import types
import warnings

os.environ["TRITON_INTERPRET"] = "1"
warnings.filterwarnings("ignore")

import torch  # noqa: E402
from triton.runtime import autotuner  # noqa: E402

autotuner.Autotuner._bench = lambda self, *args, **kwargs: [1.0, 1.0, 1.0]  # nothing to measure: the first configuration


def attention(q, k, v, causal=True, window_size=(-1, -1), **_):
    """flash_attn's function for FLA's attention layer: q, k, v [B, T, heads, dim]."""
    T = q.shape[1]
    distance = torch.arange(T)[:, None] - torch.arange(T)
    seen = (distance >= 0) & ((distance <= window_size[0]) if window_size[0] >= 0 else True)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=k.shape[1] != q.shape[1]).transpose(1, 2)


flash = types.ModuleType("flash_attn")
flash.flash_attn_func = attention
flash.flash_attn_varlen_func = None
flash.__spec__ = types.SimpleNamespace(name="flash_attn")
sys.modules["flash_attn"] = flash

import fla.layers.comba  # noqa: E402
import fla.layers.mamba2  # noqa: E402
import fla.models  # noqa: E402
import transformers  # noqa: E402

import fastweight.fla  # noqa: E402
from fastweight import convert  # noqa: E402

transformers.logging.set_verbosity_error()
COMMON = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TWO = {"num_heads": 2, "head_dim": 16}
HYBRID = {"attn": {"layers": [1], "num_heads": 2, "num_kv_heads": 1, "window_size": 8}}
MODELS = {
    "transformer": ("Transformer", {"num_heads": 2}),
    "delta_net": ("DeltaNet", {"num_heads": 2}),
    "gated_deltanet": ("GatedDeltaNet", {**TWO, "num_v_heads": 4, "expand_v": 2}),
    "gated_deltanet, hybrid": ("GatedDeltaNet", {**TWO, **HYBRID}),
    "comba": ("Comba", {**TWO, "expand_v": 1}),
    "kda": ("KDA", TWO),
    "precond_gated_deltanet": ("PrecondGatedDeltaNet", {**TWO, "expand_v": 1}),
    "precond_kda": ("PrecondKDA", TWO),
    "linear_attn": ("LinearAttention", {"num_heads": 2}),
    "gla": ("GLA", {"num_heads": 2}),
    "hgrn2": ("HGRN2", {"num_heads": 2, "expand_ratio": 16}),
    "retnet": ("RetNet", {"num_heads": 2}),
    "mamba": ("Mamba", {"state_size": 8}),
    "mamba2": ("Mamba2", {"head_dim": 16, "num_heads": 4, "state_size": 16, "chunk_size": 16}),
    "mamba2, groups": ("Mamba2", {"head_dim": 16, "num_heads": 4, "state_size": 16, "n_groups": 2, "chunk_size": 16}),
    "samba": ("Samba", {"state_size": 8, "attn": {"layers": [1], "num_heads": 2, "num_kv_heads": 1, "window_size": 8}}),
}
PROMPT, TOKENS = [5, 9, 17, 3, 40, 22, 11], 24


def comba_of_the_kernels(q, k, v, p, g, beta, initial_state=None, output_final_state=False, **_):
    """FLA's kernels one token at a time: the erase looks at the state before the token's decay, in its own reference (naive.py) at the one after it."""
    dtype = v.dtype
    q, k, p = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q.double(), k.double(), p.double()))
    v, g, beta = v.double(), g.double(), beta.double()
    B, T, H, K = q.shape
    state = torch.zeros(B, H, K, v.shape[-1], dtype=torch.float64) if initial_state is None else initial_state.double()
    out = []
    for t in range(T):
        erased = beta[:, t, :, None] * torch.einsum("bhkv,bhk->bhv", state, p[:, t])
        state = g[:, t, :, None, None].exp() * state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * v[:, t] - erased)
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t] * K**-0.5))
    return torch.stack(out, 1).to(dtype), state.to(dtype) if output_final_state else None


def groups_as_in_kernels():
    """FLA's torch path for Mamba-2's prefill gives head h group h mod n_groups; its path for a step, and the kernels of mamba_ssm that it has on a GPU, h / (heads / n_groups)."""
    mixer = fla.layers.mamba2.Mamba2
    source = textwrap.dedent(inspect.getsource(mixer.torch_forward))
    wrong = ".repeat(1, 1, self.num_heads // self.n_groups, 1)"
    if source.count(wrong) != 2:
        raise RuntimeError(f"fla.layers.mamba2: expected {wrong} twice in torch_forward, got {source.count(wrong)}")
    exec(source.replace(wrong, ".repeat_interleave(self.num_heads // self.n_groups, 2)"), vars(fla.layers.mamba2))
    mixer.torch_forward = fla.layers.mamba2.torch_forward


def checked(name, folder):
    """A row of what was found: shards, the ids that the program generates, those that FLA's model thinks likeliest after each, the largest difference of their
    logarithms of probabilities, and that of logits of the model that is exported again and read by FLA."""
    kind, values = MODELS[name]
    torch.manual_seed(0)
    model = getattr(fla.models, f"{kind}ForCausalLM")(getattr(fla.models, f"{kind}Config")(**COMMON, **values)).eval()
    for parameter_name, parameter in model.named_parameters():  # so that tokens are far apart
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=(1 if "embed" in parameter_name else 1.5) * parameter.shape[-1] ** -0.5)
    theirs, ours, again = folder / "theirs", folder / "ours", folder / "again"
    model.save_pretrained(theirs, max_shard_size="100KB")
    convert.import_model(theirs, ours)
    program = [convert._program(), "generate", str(ours), "--prompt", " ".join(map(str, PROMPT)), "--tokens", str(TOKENS), "--greedy", "--ignore-end", "--json"]
    done = subprocess.run(program, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    found = json.loads(done.stdout)
    # Greedy tokens are equal if each is what their model takes after all before it.
    ids = torch.tensor([PROMPT + found["ids"]])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
        after = logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        convert.export_model(ours, again)
        back = type(model).from_pretrained(again).eval()(ids, use_cache=False).logits
    difference = after.gather(1, torch.tensor(found["ids"])[:, None])[:, 0] - torch.tensor(found["logprobs"])
    return {"model": name, "shards": len(list(theirs.glob("model-*.safetensors"))), "ids": found["ids"], "theirs": after.argmax(-1).tolist(),
            "logprobs": float(difference.abs().max()), "again": float((back - logits).abs().max())}


def main():
    folder = pathlib.Path(sys.argv[1])
    fastweight.fla.enable()
    groups_as_in_kernels()
    fla.layers.comba.chunk_comba = fla.layers.comba.fused_recurrent_comba = comba_of_the_kernels
    for name in sys.argv[2:] or MODELS:
        try:
            row = checked(name, folder / name.replace(", ", "_"))
        except Exception as error:
            row = {"model": name, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
