"""Published models as shapes, with their sources."""

from __future__ import annotations

from planner.performance.published import gpt

from unicron_lightning.planner.performance.shape import ModelShape

GPT_22B, GPT_175B, GPT_530B, GPT_1T = gpt(48, 6144, 64), gpt(96, 12288, 96), gpt(105, 20480, 128), gpt(128, 25600, 160)


def llama(layers: int, hidden: int, heads: int, ffn: int, kv_heads: int = 8) -> ModelShape:
    """A model of "The Llama 3 Herd of Models" (arXiv 2407.21783), table 3, at 8,192 tokens."""
    return ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_size=ffn,
        gated=True,
        biases=False,
        learned_positions=False,
        tied_embeddings=False,
        sequence_length=8192,
        vocabulary_size=128256,
    )


LLAMA_8B, LLAMA_70B, LLAMA_405B = (
    llama(32, 4096, 32, 14336),
    llama(80, 8192, 64, 28672),
    llama(126, 16384, 128, 53248),
)
