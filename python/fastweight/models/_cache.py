"""FastweightCache: what the layers of a model remember between calls."""

from __future__ import annotations

import torch
from transformers import Cache

from fastweight._library import Error


class _LayerCache:
    """What one layer remembers of N sequences. Tensors that the layer has no use for are None.

    state: LayerState or Mamba3State of a layer with a recurrence. tail: [N, kernel - 1, d], last inputs of a gated convolution. shift: [N, 1, d], last input of a channel mix.
    k, v: [N, HK, S, D] of attention, rotated, and position: int64 [N, S], the place of each in its sequence, -1 where there is none. Without a window
    S grows; of a window it is window + 1: the token at place p lies in slot p % window, and the last slot takes what is thrown away.
    """

    is_compileable = is_croppable = is_sliding = supports_early_init = False

    def __init__(self):
        self.reset()

    def reset(self):
        self.state = self.tail = self.shift = self.k = self.v = self.position = None

    def tensors(self):
        return [t for t in (*(self.state or ()), self.tail, self.shift, self.k, self.v, self.position) if t is not None]

    def map(self, change):
        if self.state is not None:
            self.state = type(self.state)(*(None if t is None else change(t) for t in self.state))
        for name in ("tail", "shift", "k", "v", "position"):
            if getattr(self, name) is not None:
                setattr(self, name, change(getattr(self, name)))

    def get_max_length(self):
        return -1

    def attend(self, k, v, position, window):
        """Keys, values and their places with those of this call, k and v [N, HK, T, D], position [N, T]; remembers them."""
        if not window:
            if self.k is not None:
                k, v, position = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2), torch.cat([self.position, position], 1)
            self.k, self.v, self.position = k, v, position
            return k, v, position
        if self.k is None:
            n, heads, _, dim = k.shape
            self.k, self.v = k.new_zeros(n, heads, window + 1, dim), v.new_zeros(n, heads, window + 1, dim)
            self.position = position.new_full((n, window + 1), -1)
        whole = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2), torch.cat([self.position, position], 1)
        kept = (position >= 0) & (position > position.amax(1, keepdim=True) - window)
        slot = torch.where(kept, position % window, window)
        self.position = self.position.scatter(1, slot, torch.where(kept, position, -1))
        slots = slot[:, None, :, None].expand_as(k)
        if torch.is_grad_enabled():
            self.k, self.v = self.k.scatter(2, slots, k), self.v.scatter(2, slots, v)
        else:
            self.k.scatter_(2, slots, k)
            self.v.scatter_(2, slots, v)
        return whole


class FastweightCache(Cache):
    """The cache of a model: states of constant size, a ring of `window` tokens, and keys and values of whole attention.

    >>> from fastweight.models import FastweightConfig, FastweightForCausalLM
    >>> model = FastweightForCausalLM(FastweightConfig(hidden_size=16, num_heads=2, head_dim=8, num_hidden_layers=1)).eval()
    >>> with torch.no_grad():
    ...     cache = model(torch.tensor([[1, 2, 3]]), use_cache=True).cache
    >>> cache.get_seq_length(), cache.nbytes
    (3, 1096)
    """

    def __init__(self, layers: int):
        super().__init__(layers=[_LayerCache() for _ in range(layers)])
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        super().reset()
        self.tokens = None  # int64 [N]: tokens of each sequence, without padding
        self.columns = 0  # with padding

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in layer.tensors())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that the calls had so far, padding among them."""
        return self.columns

    def _map(self, change):
        for layer in self.layers:
            layer.map(change)
        if self.tokens is not None:
            self.tokens = change(self.tokens)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Sequence n becomes what sequence beam_idx[n] was."""
        self._map(lambda t: t.index_select(0, beam_idx.to(t.device)))

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence `repeats` times."""
        self._map(lambda t: t.repeat_interleave(repeats, 0))

    def crop(self, tokens_to_remove: int) -> None:
        """Not possible: a state does not have its earlier values."""
        if tokens_to_remove:
            raise Error(f"crop: expected 0, since a recurrent state cannot forget its last tokens, got {tokens_to_remove}")
