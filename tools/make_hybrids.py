#!/usr/bin/env python3
"""tests/conformance/models/{qwen3_5,olmo_hybrid,qwen3_next,qwen3_5_moe,kimi_linear}: tiny hybrids computed by transformers, for `fastweight verify`.

Transformers computes norms, softmax and recurrences in float32 whatever the model's type. Its source is therefore run with
float64 in place of float32, so that the values have all digits.

    tools/make_hybrids.py [FOLDER]     writes FOLDER/NAME/{config.json,model.safetensors,io.safetensors}; needs torch and transformers"""

import importlib
import json
import pathlib
import re
import sys

import torch
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).resolve().parent.parent / "tests/conformance/models"
PROMPT, MOST_TRIES = 40, 50
COMMON = {"vocab_size": 11, "hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
          "layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 3, "pad_token_id": None,
          "bos_token_id": None, "eos_token_id": 2}
DELTA = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "shared_expert_intermediate_size": 5,
                "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}}
MODELS = {
    "qwen3_5": ("qwen3_5", "Qwen3_5TextConfig", "Qwen3_5ForCausalLM",
                {**DELTA, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True,
                 "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}}),
    "olmo_hybrid": ("olmo_hybrid", "OlmoHybridConfig", "OlmoHybridForCausalLM",
                    {**DELTA, "num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": None}}),
    "qwen3_next": ("qwen3_next", "Qwen3NextConfig", "Qwen3NextForCausalLM",
                   {**DELTA, "num_key_value_heads": 2, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                    "norm_topk_prob": False, **QWEN_EXPERTS}),
    "qwen3_5_moe": ("qwen3_5_moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM",
                    {**DELTA, "num_key_value_heads": 2, "head_dim": 8, **QWEN_EXPERTS}),
    "kimi_linear": ("kimi_linear", "KimiLinearConfig", "KimiLinearForCausalLM",
                    {"num_key_value_heads": 4, "linear_num_heads": 2, "linear_head_dim": 8, "kv_lora_rank": 6,
                     "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3, "num_experts": 6, "num_experts_per_token": 2,
                     "num_expert_group": 2, "topk_group": 1, "moe_intermediate_size": 6, "mlp_layer_types": ["dense", "sparse"]}),
}


def in_double(module_name):
    """The module of transformers with float64 wherever it says float32."""
    module = importlib.import_module(module_name)
    source = pathlib.Path(module.__file__).read_text()
    source = source.replace("torch.float32", "torch.float64").replace(".float()", ".double()")
    source = re.sub(r"torch\.float\b", "torch.float64", source)
    source = re.sub(r"^@use_kernel_func_from_hub_with_fallback\(.*\)$", "", source, flags=re.M)  # its own code, not another library's
    exec(compile(source, module.__file__, "exec"), module.__dict__)  # noqa: S102
    return module


def make(folder, name):
    package, config_class, model_class, keys = MODELS[name]
    module = in_double(f"transformers.models.{package}.modeling_{package}")
    config = getattr(importlib.import_module(f"transformers.models.{package}.configuration_{package}"), config_class)(**{**COMMON, **keys})
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(module, model_class)(config)
    saved = model.state_dict()
    biases = {n: b for n, b in model.named_buffers() if n in saved}  # of a router's choice
    with torch.no_grad():
        for parameter in [*model.parameters(), *biases.values()]:  # none at a special value
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.2))
    model = model.double()
    biases = {n: b for n, b in model.named_buffers() if n in saved}
    with torch.no_grad():
        for parameter in [*model.parameters(), *biases.values()]:  # weights that float32 has exactly
            parameter.copy_(parameter.float())
    for seed in range(MOST_TRIES):
        torch.manual_seed(100 + seed)
        ids = torch.randint(0, config.vocab_size, (2, 70))
        row, greedy, margin = ids[:1, :PROMPT], [], 1.0
        for _ in range(8):
            with torch.no_grad():
                best = model(row, use_cache=False).logits[0, -1].topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            greedy.append(int(best.indices[0]))
            row = torch.cat([row, best.indices[:1][None]], 1)
        if margin > 0.02:
            break
    logits = model(ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    io = {"input_ids": ids.int(), "logits": logits.detach(), "loss": loss.detach().reshape(1),
          "greedy": torch.tensor([greedy], dtype=torch.int32)}
    tensors = {n: p.detach() for n, p in model.named_parameters()}
    tensors.update(biases)
    io.update({f"grad/{n}": p.grad for n, p in model.named_parameters()})
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    save_file({n: t.float().contiguous() for n, t in tensors.items()}, target / "model.safetensors", {"format": "pt"})
    save_file({n: t.contiguous() for n, t in io.items()}, target / "io.safetensors")
    (target / "config.json").write_text(json.dumps(config.to_diff_dict() | {"architectures": [model_class]}, indent=1) + "\n")
    print(f"{name}: {sum(p.numel() for p in model.parameters())} parameters, margin {margin:.3f}")


if __name__ == "__main__":
    for model_name in MODELS:
        make(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else HERE, model_name)
