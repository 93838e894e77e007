"""Parameters and floating-point operations of a transformer.

The counts are those of Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM" (arXiv 2104.04473), section 5.1 and appendix, generalised to grouped keys and values, to any width of the
feed-forward part, and to gated ones. With the paper's shapes they equal

    P = 12 l h^2 (1 + 13/(12 h) + (V + s)/(12 l h))                                     parameters
    F = 96 B s l h^2 (1 + s/(6 h) + V/(16 l h))              FLOPs of a step with full recomputation
    F = 72 B s l h^2 (1 + s/(6 h) + V/(12 l h))              FLOPs of a step without: the *model's* FLOPs

B: global batch (samples), s: sequence length (tokens), l: layers, h: hidden size, V: vocabulary. A multiply-add is two
operations; only matrix products are counted; attention counts the whole s x s square, masked or not. T(t,x) is in the
model's FLOPs, which exclude recomputation. Selective recomputation adds its 4 B s^2 h per layer; the formula of
Korthikanti et al. 2022 (s/(3 h) for s/(6 h)) counts three times as much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer.

    Attributes:
        num_layers: l.
        hidden_size: h.
        num_heads: a, a divisor of h.
        sequence_length: s, in tokens.
        vocabulary_size: V, as padded.
        num_kv_heads: heads of keys and values, a divisor of a; 0 means a (no grouping).
        ffn_size: width of the feed-forward part; 0 means 4 h.
        gated: whether the feed-forward part has a third matrix, as SwiGLU does.
        biases: whether linear layers and norms have biases.
        learned_positions: whether the model has a table of s positions.
        tied_embeddings: whether the output layer is the embedding.

    Raises:
        ValueError: a size is below 1, or a number of heads does not divide.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    sequence_length: int
    vocabulary_size: int
    num_kv_heads: int = 0
    ffn_size: int = 0
    gated: bool = False
    biases: bool = True
    learned_positions: bool = True
    tied_embeddings: bool = True

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "sequence_length", "vocabulary_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a whole number of at least 1")
        for name in ("num_kv_heads", "ffn_size"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected 0 (the default) or more")
        if self.hidden_size % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads}: expected a divisor of hidden_size={self.hidden_size}")
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_kv_heads={self.kv_heads}: expected a divisor of num_heads={self.num_heads}")

    @property
    def kv_heads(self) -> int:
        """Heads of keys and of values."""
        return self.num_kv_heads or self.num_heads

    @property
    def ffn(self) -> int:
        """Width of the feed-forward part."""
        return self.ffn_size or 4 * self.hidden_size

    @property
    def kv_size(self) -> int:
        """Width of the keys, and of the values: h with a head of each per query head."""
        return self.hidden_size // self.num_heads * self.kv_heads

    @property
    def layer_matrix_parameters(self) -> int:
        """Elements of one layer's matrices: queries, keys, values, output; up, (gate,) down."""
        attention = 2 * self.hidden_size * (self.hidden_size + self.kv_size)
        return attention + (3 if self.gated else 2) * self.hidden_size * self.ffn

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer, biases and its two norms included."""
        vectors = 2 * self.hidden_size  # the norms' scales
        if self.biases:
            ffn = self.ffn * (2 if self.gated else 1)
            # Both norms, queries, output, down; keys and values; up (and gate).
            vectors += 5 * self.hidden_size + 2 * self.kv_size + ffn
        return self.layer_matrix_parameters + vectors

    @property
    def embedding_parameters(self) -> int:
        """Parameters before the first layer."""
        return (self.vocabulary_size + (self.sequence_length if self.learned_positions else 0)) * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Parameters after the last layer; with tied embeddings they are the embedding's."""
        return self.vocabulary_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """P, without the norm after the last layer, as in the paper."""
        untied = 0 if self.tied_embeddings else self.head_parameters
        return self.num_layers * self.layer_parameters + self.embedding_parameters + untied

    def layer_matrix_flops(self, num_samples: int) -> int:
        """FLOPs of one layer's matrices, forward, for ``num_samples`` sequences."""
        return 2 * num_samples * self.sequence_length * self.layer_matrix_parameters

    def layer_attention_flops(self, num_samples: int) -> int:
        """FLOPs of one layer's two products of s x s, forward: 4 B s^2 h."""
        return 4 * num_samples * self.sequence_length**2 * self.hidden_size

    def head_flops(self, num_samples: int) -> int:
        """FLOPs of the output layer, forward: 2 B s h V."""
        return 2 * num_samples * self.sequence_length * self.head_parameters

    def step_flops(self, global_batch_size: int, recompute: Recompute = "none") -> int:
        """F: FLOPs of an optimizer step; with ``none`` those of the model, else those executed by the hardware.

        Args:
            global_batch_size: B, in samples.
            recompute: recomputation in the backward pass: none, the s x s part (selective), or whole layers (full).
        """
        matrices = self.layer_matrix_flops(global_batch_size)
        attention = self.layer_attention_flops(global_batch_size)
        again = {"none": 0, "selective": attention, "full": matrices + attention}[recompute]
        # A backward pass has two products for each one forward: gradients of the inputs and of the weights.
        return self.num_layers * (3 * (matrices + attention) + again) + 3 * self.head_flops(global_batch_size)
