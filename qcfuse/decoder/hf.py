"""The decoder view of a transformers model (Llama, Mistral, Qwen2, Qwen3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qcfuse.decoder.base import Decoder

SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class HFDecoder(Decoder):
    """Takes a transformers causal LM apart at its attention; the model itself stays usable.

    q, k, v and gate, up are run as one matrix product each: their weights become views of one tensor, so that no
    memory is spent. Raises ValueError for an architecture whose layer this view does not describe.
    """

    def __init__(self, model: nn.Module) -> None:
        name = type(model).__name__
        if name not in SUPPORTED:
            raise ValueError(f"{name} is not supported; what works: {', '.join(SUPPORTED)}")
        config = model.config
        self.model = model
        self.layers = model.model.layers
        self.num_layers = config.num_hidden_layers
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_position_embeddings
        self.device = model.device
        self.dtype = model.dtype
        self._widths = [self.num_heads * self.head_dim, *[self.num_kv_heads * self.head_dim] * 2]
        self._qkv = [_merge(a.q_proj, a.k_proj, a.v_proj) for a in (layer.self_attn for layer in self.layers)]
        self._gate_up = [_merge(layer.mlp.gate_proj, layer.mlp.up_proj) for layer in self.layers]

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.model.embed_tokens(ids)

    def project(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._linear(self._qkv[layer], self._input_norm(layer, hidden)).split(self._widths, -1)
        return self._head_norm(layer, "q_norm", q), self._head_norm(layer, "k_norm", k), self._heads(v)

    def project_kv(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        weight, bias = self._qkv[layer]
        kv = (weight[self._widths[0] :], None if bias is None else bias[self._widths[0] :])
        k, v = self._linear(kv, self._input_norm(layer, hidden)).split(self._widths[1:], -1)
        return self._head_norm(layer, "k_norm", k), self._heads(v)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        cos, sin = self.model.model.rotary_emb(like, positions[None])
        half = self.head_dim // 2
        return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()

    def finish(self, layer: int, hidden: Tensor, attn_out: Tensor) -> Tensor:
        block = self.layers[layer]
        hidden = hidden + block.self_attn.o_proj(attn_out.reshape(attn_out.shape[0], -1))
        gate, up = self._linear(self._gate_up[layer], _rms(hidden, block.post_attention_layernorm)).chunk(2, -1)
        return hidden + block.mlp.down_proj(block.mlp.act_fn(gate).mul_(up))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.lm_head(_rms(hidden, self.model.model.norm)).float()

    def _input_norm(self, layer: int, hidden: Tensor) -> Tensor:
        return _rms(hidden, self.layers[layer].input_layernorm)

    def _head_norm(self, layer: int, name: str, x: Tensor) -> Tensor:
        norm = getattr(self.layers[layer].self_attn, name, None)
        return self._heads(x) if norm is None else _rms(self._heads(x), norm)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    @staticmethod
    def _linear(weights: tuple[Tensor, Tensor | None], x: Tensor) -> Tensor:
        return F.linear(x, *weights)


def _rms(x: Tensor, norm: nn.Module) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _merge(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """One weight (and bias) for several linears of the same input; each linear keeps a view of its part."""
    weight = torch.cat([linear.weight.data for linear in linears])
    biased = linears[0].bias is not None
    bias = torch.cat([linear.bias.data for linear in linears]) if biased else None
    start = 0
    for linear in linears:
        end = start + linear.out_features
        linear.weight.data = weight[start:end]
        if bias is not None:
            linear.bias.data = bias[start:end]
        start = end
    return weight, bias
