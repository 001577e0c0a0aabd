"""FastweightModel and FastweightForCausalLM."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg

from fastweight._library import Error
from fastweight.models import _layers
from fastweight.models._cache import FastweightCache
from fastweight.models._configuration import FastweightConfig
from fastweight.torch.nn import DeltaRuleLayer, _SequenceLayer

_DEVIATION = 0.02  # of embeddings and of the head
_OWNERS = (DeltaRuleLayer, _SequenceLayer, _layers.AttentionMixer, _layers.MlaMixer, _layers.ConvMixer, _layers.Swiglu, _layers.ChannelMix, _layers.Experts, _layers.Norm)


class FastweightPreTrainedModel(PreTrainedModel):
    """What the classes of models have in common; it is not made itself.

    >>> FastweightPreTrainedModel.config_class.__name__
    'FastweightConfig'
    """

    config: FastweightConfig
    config_class = FastweightConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FastweightBlock"]
    _supports_sdpa = True
    _is_stateful = True

    def _initialize_weights(self, module, *args):
        # Modules without parameters of their own draw those of their projections: transformers would pass them over in code that is not its own.
        super()._initialize_weights(module)

    def _init_weights(self, module):
        if isinstance(module, _OWNERS):
            _layers.initialise(module)
        elif isinstance(module, FastweightModel) and module.lower_bounds is not None and not getattr(module.lower_bounds, "_is_hf_initialized", False):
            nn.init.zeros_(module.lower_bounds)
        elif isinstance(module, (nn.Embedding, nn.Linear)) and not getattr(module.weight, "_is_hf_initialized", False):
            module.weight.normal_(0.0, _DEVIATION)


class FastweightModel(FastweightPreTrainedModel):
    """The model without its head: AutoModel's class.

    >>> model = FastweightModel(FastweightConfig(hidden_size=16, num_heads=2, head_dim=8, num_hidden_layers=1))
    >>> model(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
    torch.Size([1, 3, 16])
    """

    def __init__(self, config: FastweightConfig):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = range(config.num_hidden_layers)
        self.embeddings_norm = _layers.Norm(config.hidden_size, config.norm_eps, config.norm) if config.embedding_norm else None
        self.layers = nn.ModuleList([_layers.FastweightBlock(config, layer) for layer in layers])
        self.norm = _layers.Norm(config.hidden_size, config.norm_eps, config.norm)
        bounded = config.decay_gate == "bounded" and any(isinstance(block.attn, DeltaRuleLayer) for block in self.layers)
        self.lower_bounds = nn.Parameter(torch.zeros(len(layers), config.num_heads * config.head_dim)) if bounded else None
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self):
        return self.embeddings

    def set_input_embeddings(self, value):
        self.embeddings = value

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")  # as transformers' own models have it
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: FastweightCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        cu_seqlens: torch.Tensor | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """Hidden states [B, T, d] of input_ids [B, T] or of inputs_embeds [B, T, d].

        attention_mask: [B, T] or, with a cache, [B, columns so far + T]: 0 is padding, wherever it lies. It changes nothing for the other tokens, and its own
        hidden states are 0. cu_seqlens, or position_ids of one row that begin at 0 more than once: packed sequences. Other position_ids have no effect.
        cu_seq_lens_q: cu_seqlens as transformers' collators name it; what comes with it (cu_seq_lens_k, max_length_q) is not needed.
        use_cache: None: as the configuration says, without it in training.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise Error("input_ids: expected either input_ids or inputs_embeds, got " + ("neither" if input_ids is None else "both"))
        if output_attentions:
            raise Error("output_attentions: expected False, since recurrent layers have no attention weights, got True")
        cu_seqlens = cu_seqlens if cu_seq_lens_q is None else cu_seq_lens_q
        x = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = use_cache if use_cache is not None else self.config.use_cache and not self.training
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            use_cache, cache = False, None
        if cache is not None and not isinstance(cache, FastweightCache):
            raise Error(f"cache: expected a FastweightCache or None, got {type(cache).__name__}")
        if use_cache and cache is None:
            cache = FastweightCache(len(self.layers))
        layout = _layout(x, attention_mask, position_ids, cu_seqlens, cache)
        if cache is not None and cache.tokens is not None and len(cache.tokens) != layout.sequences:
            raise Error(f"cache: expected one of {layout.sequences} sequences, as input_ids has, got one of {len(cache.tokens)}")

        states = [x] if output_hidden_states else None
        x = layout.pack(x)
        if self.embeddings_norm is not None:
            x = self.embeddings_norm(x)
        shares = None if self.lower_bounds is None else self.lower_bounds.softmax(0)
        v_first = None
        for i, block in enumerate(self.layers):
            bound = None if shares is None else shares[1 : i + 1].sum(0)
            mine = None
            if cache is not None:
                mine = cache.layers[i]
                mine.begin = cache.tokens
            x = block(x, layout, lower_bound=bound, cache=mine, v_first=v_first)
            if isinstance(x, tuple):
                x, v_first = x
            if output_hidden_states and i + 1 < len(self.layers):
                states.append(layout.unpack(x))
        x = layout.unpack(self.norm(x))
        if output_hidden_states:
            states.append(x)
        if cache is not None:
            cache.tokens = layout.lengths if cache.tokens is None else cache.tokens + layout.lengths
            cache.columns += layout.columns
        return BaseModelOutputWithPast(last_hidden_state=x, cache=cache if use_cache else None, hidden_states=None if states is None else tuple(states))


def _layout(x, mask, position_ids, cu_seqlens, cache):
    rows, columns = x.shape[:2]
    if mask is not None:
        if mask.dim() != 2 or mask.shape[0] != rows or mask.shape[1] < columns:
            raise Error(f"attention_mask: expected [{rows}, {columns}] or, with a cache, more columns, got shape {list(mask.shape)}")
        mask = mask[:, -columns:] != 0
        if mask.all():
            mask = None
    fresh = cache is None or cache.tokens is None
    if cu_seqlens is not None:
        if rows != 1 or mask is not None or not fresh or cu_seqlens.dim() != 1 or int(cu_seqlens[-1]) != columns:
            raise Error(f"cu_seqlens: expected [N + 1] offsets that end at T, one row, and neither padding nor a cache, got offsets {cu_seqlens.tolist()}, "
                        f"shape {[rows, columns]}" + (", padding" if mask is not None else "") + ("" if fresh else ", a cache"))
        return _layers.Layout(x, offsets=cu_seqlens)
    if mask is None and position_ids is not None and rows == 1 and columns > 1 and fresh and position_ids.shape[-1] == columns:
        begins = (position_ids.reshape(-1) == 0).nonzero()[:, 0]
        if len(begins) > 1:
            if int(begins[0]):
                raise Error("position_ids: expected packed sequences, whose first token is at 0, got " + str(int(position_ids.reshape(-1)[0])))
            return _layers.Layout(x, offsets=F.pad(begins, (0, 1), value=columns))
    return _layers.Layout(x, mask=mask)


class FastweightForCausalLM(FastweightPreTrainedModel, GenerationMixin):
    """The language model: AutoModelForCausalLM's class.

    >>> model = FastweightForCausalLM(FastweightConfig(hidden_size=16, num_heads=2, head_dim=8, num_hidden_layers=1)).eval()
    >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False).shape
    torch.Size([1, 7])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}

    def __init__(self, config: FastweightConfig):
        super().__init__(config)
        self.model = FastweightModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, value):
        self.lm_head = value

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False  # generate() leaves making a cache to forward()

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")  # as transformers' own models have it
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: FastweightCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        cu_seqlens: torch.Tensor | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Logits [B, T, vocab_size], and with labels (shifted here, -100 is left out) the loss. Other arguments: as FastweightModel has them."""
        outputs = self.model(input_ids, attention_mask=attention_mask, position_ids=position_ids, cache=cache, inputs_embeds=inputs_embeds,
                             use_cache=use_cache, output_hidden_states=output_hidden_states, output_attentions=output_attentions, cu_seqlens=cu_seqlens, cu_seq_lens_q=cu_seq_lens_q)
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, cache=outputs.cache, hidden_states=outputs.hidden_states)
