"""Hugging Face classes for this project's models: what `fastweight train` wrote opens with AutoModelForCausalLM, and what is saved opens in the engine.

    import fastweight.models                     # registers the classes below
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained("run/model")
    tokenizer = AutoTokenizer.from_pretrained("run/model")

    >>> from transformers import AutoConfig
    >>> AutoConfig.for_model("fastweight", rule="kda").layer_kind(0)
    'kda'

Layers are all that the engine has: those of fastweight.torch.nn, softmax attention (whole, of a window or latent), gated convolution and mixtures of
experts. generate(), Trainer, PEFT and lm-evaluation-harness take the model as any other.
"""

from __future__ import annotations

try:
    import transformers
    from transformers.modeling_outputs import CausalLMOutputWithPast
except ImportError as error:
    raise ImportError(f"fastweight.models: expected transformers 5.24 or newer (pip install 'transformers>=5.24'), got: {error}") from error
if "cache" not in CausalLMOutputWithPast.__dataclass_fields__:
    raise ImportError(f"fastweight.models: expected transformers 5.24 or newer, whose outputs have a field cache, got {transformers.__version__}")

from fastweight.models._cache import FastweightCache
from fastweight.models._configuration import FastweightConfig
from fastweight.models._modeling import FastweightForCausalLM, FastweightModel, FastweightPreTrainedModel
from fastweight.models._tokenizer import ByteTokenizer, SentencePieceTokenizer

transformers.AutoConfig.register("fastweight", FastweightConfig, exist_ok=True)
transformers.AutoModel.register(FastweightConfig, FastweightModel, exist_ok=True)
transformers.AutoModelForCausalLM.register(FastweightConfig, FastweightForCausalLM, exist_ok=True)
transformers.AutoTokenizer.register(FastweightConfig, ByteTokenizer, slow_tokenizer_class=SentencePieceTokenizer, exist_ok=True)

__all__ = ["ByteTokenizer", "FastweightCache", "FastweightConfig", "FastweightForCausalLM", "FastweightModel", "FastweightPreTrainedModel", "SentencePieceTokenizer"]


def __dir__() -> list[str]:
    return list(__all__)
