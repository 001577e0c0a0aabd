"""FastweightConfig: the keys of a model folder's config.json, as the engine reads and writes them (src/model/config.def and the files beside it)."""

from __future__ import annotations

import copy
import difflib

from transformers import GenerationConfig, PreTrainedConfig

from fastweight._library import Error

# Every key of the engine with its default. The engine leaves _OPTIONAL out of config.json where they have it.
_KEYS = {
    "rule": "gated_deltanet2", "vocab_size": 256, "hidden_size": 192, "num_hidden_layers": 4, "layers": [], "num_heads": 3, "num_v_heads": 0, "head_dim": 64,
    "expand_v": 1.0, "conv_size": 4, "intermediate_size": 0, "hidden_ratio": 4.0, "mlp": "swiglu", "norm": "rms", "embedding_norm": False, "norm_eps": 1e-5,
    "tie_word_embeddings": True, "allow_neg_eigval": False, "output_gate": "silu", "output_gate_rank": 0, "output_gate_bias": True, "output_norm": "head", "output_norm_eps": 0.0,
    "decay_rank": 0, "decay_per_value_head": False, "decay_gate": "softplus", "feature_map": "none", "rope_theta": 0.0, "gain_source": "projection",
    "gain_factor": "none", "single_gate": False, "precond_gates": "own", "precond_center": "parameter", "raw_read_correction": False, "init": "xavier",
    "precond_x": 1.5,
}
_OPTIONAL = ("layers", "mlp", "norm", "embedding_norm", "output_gate_bias", "output_norm", "output_norm_eps")
_ATTENTION = {"num_heads": 0, "num_kv_heads": 0, "head_dim": 0, "rope_theta": 10000.0, "rope_fraction": 1.0, "qk_norm": False, "qk_norm_all_heads": False,
              "qk_norm_eps": 1e-5, "output_gate": False, "post_norm": False, "qkv_bias": False}
_MAMBA = {"expand": 2, "state_size": 16, "dt_rank": 0, "conv_size": 4}
# Keys of the layers of the engine that are no rules. longhorn_diag has those of mamba.
_TABLES = {
    "attention": _ATTENTION, "window": {"window": 2048, **_ATTENTION}, "conv": {"kernel": 3}, "mamba": _MAMBA, "longhorn_diag": _MAMBA,
    "ssd": {"expand": 2, "head_dim": 64, "state_size": 128, "num_groups": 1, "conv_size": 4},
    "mamba3": {"expand": 2, "head_dim": 64, "state_size": 128, "num_groups": 1, "mimo_rank": 0, "rope_fraction": 0.5, "rotation": "auto",
               "decay_activation": "softplus", "decay_floor": 1e-4, "output_norm": False},
    "mesa": {"num_heads": 0, "head_dim": 0, "conv_size": 4, "output_gate": "none", "least_lambda": 0.25, "cg_steps": 0, "cg_tolerance": 1e-6},
    "rwkv7": {"head_dim": 0, "decay_rank": 0, "rate_rank": 0, "value_rank": 0, "gate_rank": 0, "key_eps": 0.0},
    "mla": {"num_heads": 0, "kv_rank": 512, "key_dim": 128, "shared_key_dim": 64, "value_dim": 128},
}
_EXPERTS = {"num_experts": 8, "top_k": 2, "intermediate_size": 0, "shared_size": 0, "shared_gate": False, "dense_layers": 0, "router": "softmax",
            "normalise": True, "scale": 1.0, "groups": 1, "top_groups": 1, "correction_bias": False, "balance": 0.0}
_CHOICES = {"mlp": ("swiglu", "channel_mix", "experts", "none"), "norm": ("rms", "zero_centered_rms", "layer")}
# What transformers gives a configuration beside the model's keys.
_OF_TRANSFORMERS = {*PreTrainedConfig().to_dict(), *GenerationConfig().to_dict(), "attn_implementation", "auto_map", "experts_implementation", "name_or_path",
                    "num_labels", "output_attentions", "per_layer_config", "quantization_config", "tokenizer_class", "torch_dtype"}


def _with_defaults(table, keys, given):
    for name in given:
        if name not in keys:
            raise Error(f"{table}.{name}: expected one of {', '.join(keys)}")
    return {**keys, **given}


class FastweightConfig(PreTrainedConfig):
    """A model of the engine. Arguments are the keys of its config.json; `fastweight train --help` describes them.

    layers: kind of each layer, repeated to the depth: "recurrent" (that is `rule`), the name of another rule, "attention", "window", "conv", "mamba",
    "longhorn_diag", "ssd", "mamba3", "mesa", "rwkv7" or "mla". Without a list all are recurrent. mixer: {"attention": {...}, "window": {...}, ...}, the
    keys of layers that are no rules. ffn: {"experts": {...}}, the keys of mlp="experts".

    config.json has the engine's keys alone, so that the engine opens the folder. Special tokens belong into generation_config.json.

    >>> config = FastweightConfig(rule="kda", layers=["recurrent", "window"], mixer={"window": {"window": 128}})
    >>> config.layer_kind(0), config.layer_kind(1), config.layer_keys(1)["window"]
    ('kda', 'window', 128)
    """

    model_type = "fastweight"
    attribute_map = {"num_attention_heads": "num_heads"}
    keys_to_ignore_at_inference = ["cache"]

    def __init__(self, *, mixer=None, ffn=None, peer=None, use_cache=True, **kwargs):
        for name, default in _KEYS.items():
            setattr(self, name, kwargs.pop(name, copy.copy(default)))
        self.mixer, self.ffn, self.peer, self.use_cache = mixer or {}, ffn or {}, peer, use_cache
        for name in kwargs:
            if name not in _OF_TRANSFORMERS and not name.startswith("_"):
                near = difflib.get_close_matches(name, _KEYS, 1)
                hint = f" (nearest: {near[0]})" if near else ""
                raise Error(f"{name}: expected a key of the program's config.json, got one that fastweight.models does not know{hint}")
        for name, words in _CHOICES.items():
            if getattr(self, name) not in words:
                raise Error(f"{name}: expected one of {', '.join(words)}, got {getattr(self, name)!r}")
        if len(self.layers) > self.num_hidden_layers:
            raise Error(f"layers: expected at most num_hidden_layers = {self.num_hidden_layers} entries, got {len(self.layers)}")
        super().__init__(tie_word_embeddings=self.tie_word_embeddings, **kwargs)

    def layer_kind(self, layer: int) -> str:
        """A rule, or "attention" or another kind of the engine that is no rule."""
        name = self.layers[layer % len(self.layers)] if self.layers else "recurrent"
        return self.rule if name == "recurrent" else name

    def layer_keys(self, layer: int) -> dict:
        """Keys of a layer that is no rule, with their defaults; {} of a rule's."""
        kind = self.layer_kind(layer)
        keys, given = _TABLES.get(kind, {}), self.mixer.get("mamba" if kind == "longhorn_diag" else kind, {})
        return _with_defaults(f"mixer.{kind}", keys, given)

    def experts_keys(self) -> dict:
        """Keys of the mixtures of experts, with their defaults and their width. Raises Error for keys that do not go together."""
        keys = _with_defaults("ffn.experts", _EXPERTS, self.ffn.get("experts", {}))
        keys["intermediate_size"] = keys["intermediate_size"] or max(self.mlp_size // keys["top_k"], 1)
        if keys["router"] not in ("softmax", "sigmoid"):
            raise Error(f"ffn.experts.router: expected one of softmax, sigmoid, got {keys['router']!r}")
        experts, groups = keys["num_experts"], keys["groups"]
        if experts % groups or not 1 <= keys["top_groups"] <= groups:
            raise Error(f"ffn.experts.groups: expected a number that divides the {experts} experts, and top_groups from 1 to it, got {groups} and {keys['top_groups']}")
        if not 1 <= keys["top_k"] <= experts // groups * keys["top_groups"]:
            raise Error(f"ffn.experts.top_k: expected 1 to {experts // groups * keys['top_groups']}, the experts that a token chooses from, got {keys['top_k']}")
        if keys["shared_gate"] and not keys["shared_size"]:
            raise Error("ffn.experts.shared_gate: expected False without a shared expert (shared_size = 0), got True")
        return keys

    @property
    def mlp_size(self) -> int:
        """Width of the MLP; 0 without one."""
        if self.mlp == "none":
            return 0
        if self.intermediate_size > 0:
            return self.intermediate_size
        if self.mlp == "channel_mix":
            return max(-(-int(self.hidden_ratio * self.hidden_size) // 32), 1) * 32
        step = 64 if self.hidden_size < 512 else 256
        return max(-(-int(self.hidden_ratio * self.hidden_size * 2.0 / 3.0) // step), 1) * step

    def to_diff_dict(self) -> dict:
        """What config.json has."""
        keys = {name: getattr(self, name) for name in _KEYS if name not in _OPTIONAL or getattr(self, name) != _KEYS[name]}
        for name in ("mixer", "ffn", "peer", "quantization_config"):
            if getattr(self, name, None):
                keys[name] = getattr(self, name)
        return {**copy.deepcopy(keys), "model_type": self.model_type}
