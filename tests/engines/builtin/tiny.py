"""Models of each kind of cache, small enough that a test of all of them takes seconds, and stores to run them over."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kvbench.engines.builtin.models import LoadedModel, load_model
from kvbench.engines.builtin.runner import ModelRunner, RunningSequence
from kvbench.tiers.registry import open_tier
from kvbench.tiers.tiered import TieredStore, TierSettings

_BASE: Mapping[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}
_MAMBA: Mapping[str, Any] = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "gqa": {**_BASE, "model_type": "llama"},
    "mla": {
        **_BASE,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "head_dim": 8,
        "q_lora_rank": 32,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 4,
    },
    "window": {
        **_BASE,
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 16,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    },
    "window-only": {**_BASE, "model_type": "mistral", "sliding_window": 24},
    "hybrid": {
        **_BASE,
        "model_type": "qwen3_next",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "num_experts": 0,
        "mlp_only_layers": [0, 1, 2, 3],
    },
    "hybrid-mamba2": {
        **_BASE,
        **_MAMBA,
        "model_type": "bamba",
        "attn_layer_indices": [1, 3],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
    },
    "hybrid-both": {
        **_BASE,
        **_MAMBA,
        "model_type": "falcon_h1",
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_ssm": 128,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
    },
    "hybrid-conv": {
        **_BASE,
        "model_type": "lfm2",
        "block_ff_dim": 96,
        "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    },
    "hybrid-jamba": {
        **_BASE,
        **_MAMBA,
        "model_type": "jamba",
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 1,
        "use_mamba_kernels": False,
        "mamba_dt_rank": 8,
    },
}


@cache
def tiny(family: str, dtype: str = "float32", seed: int = 0) -> LoadedModel:
    """A tiny model of a family, the same for every test of a run."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(CONFIGS[family]), encoding="utf-8")
        return load_model(str(file), device="cpu", dtype=dtype, seed=seed, name=f"tiny-{family}")


def generate(
    runner: ModelRunner, prompt: list[int], *, tokens: int = 6, chunk: int = 64, **options: Any
) -> RunningSequence:
    """A whole request, greedily, with the logits of every token."""
    sequence = runner.start(prompt, max_tokens=tokens, ignore_eos=True, keep_logits=True, **options)
    while not runner.prefill_step(sequence, chunk):
        pass
    while not sequence.finished:
        runner.decode_step([sequence])
    runner.finish(sequence)
    return sequence


def largest_difference(one: RunningSequence, other: RunningSequence) -> float:
    """Between the logits of two requests for the same tokens."""
    return max(float((a - b).abs().max()) for a, b in zip(one.logits, other.logits, strict=True))


@contextmanager
def tiered_store(block_bytes: int, folder: Path, *, specs: tuple[str, ...] = ()) -> Iterator[TieredStore]:
    """hbm, dram and a directory, or other tiers."""
    chosen = specs or ("hbm:32MiB", "dram:32MiB", f"file:{folder}?size=64MiB")
    store = TieredStore([TierSettings(tier=open_tier(spec, block_bytes=block_bytes)) for spec in chosen])
    try:
        yield store
    finally:
        store.close()
