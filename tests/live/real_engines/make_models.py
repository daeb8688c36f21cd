"""Makes model directories for real engines: a Llama shape and a tokenizer, no weights (engines fill in random ones).

    python tests/live/real_engines/make_models.py FOLDER

The tokenizer is a byte-level BPE trained on this Python's own standard library. It knows ASCII only, so that any token
decodes to visible text and a server never holds a streamed chunk back for half a character.
"""

import json
import sys
import sysconfig
from pathlib import Path
from typing import Any

VOCAB_SIZE = 16384
SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|bos|>{{ m['role'] }}\n{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
# name: hidden size, layers, query heads, KV heads, feed-forward size
SHAPES = {"tiny-llama": (256, 4, 4, 2, 768), "llama-120m": (768, 12, 12, 4, 2048)}


def main(folder: Path) -> None:
    """Writes every shape of `SHAPES`."""
    tokenizer = trained_tokenizer()
    for name, shape in SHAPES.items():
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(target / "tokenizer.json"))
        for file, content in files(shape, tokenizer.get_vocab_size()).items():
            (target / file).write_text(json.dumps(content, indent=1), encoding="utf-8")
        print(target)


def trained_tokenizer() -> Any:
    """A byte-level BPE of `VOCAB_SIZE` entries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    printable = [*range(32, 127), 9, 10, 13]
    alphabet = sorted({byte_level.pre_tokenize_str(chr(code))[0][0][0] for code in printable})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = (path.read_bytes().decode("ascii", "ignore") for path in sorted(library.glob("*.py")))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def files(shape: tuple[int, int, int, int, int], vocab_size: int) -> dict[str, dict[str, Any]]:
    """The JSON files of a model directory."""
    hidden, layers, heads, kv_heads, feed_forward = shape
    special_ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "initializer_range": 0.02,
        **special_ids,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[1],
        "pad_token": SPECIALS[2],
        "model_max_length": 32768,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    return {"config.json": config, "tokenizer_config.json": tokenizer_config, "generation_config.json": special_ids}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
