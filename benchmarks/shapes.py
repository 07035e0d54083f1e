"""Models by the shape of their weights, which are random where a benchmark makes one."""

import dataclasses

from aligner.architecture import GPTArchitecture

SMOLLM2 = GPTArchitecture(
    num_layers=30,
    hidden_size=576,
    ffn_hidden_size=1536,
    num_attention_heads=9,
    num_query_groups=3,
    kv_channels=64,
    vocab_size=49152,
    max_position_embeddings=8192,
    rotary_base=100_000.0,
    tie_embeddings=True,
    family="llama",
)
QWEN_1_5B = GPTArchitecture(
    num_layers=28,
    hidden_size=1536,
    ffn_hidden_size=8960,
    num_attention_heads=12,
    num_query_groups=2,
    kv_channels=128,
    vocab_size=151_936,
    max_position_embeddings=32_768,
    layernorm_epsilon=1e-6,
    rotary_base=1_000_000.0,
    tie_embeddings=True,
    bias_qkv=True,
    family="qwen2",
)
SHAPES = {
    "qwen2.5-1.5b": QWEN_1_5B,
    "qwen2.5-7b": dataclasses.replace(
        QWEN_1_5B,
        hidden_size=3584,
        ffn_hidden_size=18_944,
        num_attention_heads=28,
        num_query_groups=4,
        vocab_size=152_064,
        tie_embeddings=False,
    ),
    "tiny": dataclasses.replace(
        QWEN_1_5B,
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        kv_channels=16,
        vocab_size=512,
        max_position_embeddings=1024,
    ),
}
