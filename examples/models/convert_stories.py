"""Turn llama2.c's stories260K into a Hugging Face directory.

    python examples/models/convert_stories.py [TARGET]        (default: models/stories260K)

Writes config.json, generation_config.json, model.safetensors (fp32), tokenizer.json and tokenizer_config.json. The
tokenizer encodes and decodes exactly as llama2.c does. Running it again when nothing changed does nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from publish import is_published, publish
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

SOURCE = Path(__file__).parent / "stories260K"
DEFAULT_TARGET = Path(__file__).parents[2] / "models" / "stories260K"
BOS_ID, EOS_ID = 1, 2
SPECIAL = {0: "<unk>", BOS_ID: "<s>", EOS_ID: "</s>"}

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Header:
    """The seven int32 at the start of a llama2.c checkpoint."""

    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    seq_len: int


def read_checkpoint(file: Path) -> tuple[Header, dict[str, Array]]:
    """Header and tensors, each stacked over layers where there are several: wq is [n_layers, d_out, d_in], fp32."""
    data = file.read_bytes()
    header = Header(*struct.unpack_from("<7i", data))
    layers, dim, inner = header.n_layers, header.dim, header.hidden_dim
    kv_dim = dim // header.n_heads * header.n_kv_heads
    shapes = {
        "tok_emb": (header.vocab_size, dim),
        "att_norm": (layers, dim),
        "wq": (layers, dim, dim),
        "wk": (layers, kv_dim, dim),
        "wv": (layers, kv_dim, dim),
        "wo": (layers, dim, dim),
        "ffn_norm": (layers, dim),
        "w1": (layers, inner, dim),
        "w2": (layers, dim, inner),
        "w3": (layers, inner, dim),
        "norm": (dim,),
    }
    tensors: dict[str, Array] = {}
    offset = struct.calcsize("<7i")
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        tensors[name] = np.frombuffer(data, dtype="<f4", count=count, offset=offset).reshape(shape)
        offset += 4 * count
    return header, tensors


def split_rope_pairs(weight: Array, n_heads: int) -> Array:
    """Rows of q or k [heads * head_dim, d_in] from interleaved pairs (llama2.c) to two halves (Hugging Face)."""
    rows, d_in = weight.shape
    return weight.reshape(n_heads, rows // n_heads // 2, 2, d_in).swapaxes(1, 2).reshape(rows, d_in)


def to_hugging_face(header: Header, tensors: dict[str, Array]) -> dict[str, Array]:
    """The state dict of LlamaForCausalLM with tied embeddings (no lm_head)."""
    state = {"model.embed_tokens.weight": tensors["tok_emb"], "model.norm.weight": tensors["norm"]}
    for layer in range(header.n_layers):
        parts = {
            "input_layernorm": tensors["att_norm"][layer],
            "self_attn.q_proj": split_rope_pairs(tensors["wq"][layer], header.n_heads),
            "self_attn.k_proj": split_rope_pairs(tensors["wk"][layer], header.n_kv_heads),
            "self_attn.v_proj": tensors["wv"][layer],
            "self_attn.o_proj": tensors["wo"][layer],
            "post_attention_layernorm": tensors["ffn_norm"][layer],
            "mlp.gate_proj": tensors["w1"][layer],
            "mlp.up_proj": tensors["w3"][layer],
            "mlp.down_proj": tensors["w2"][layer],
        }
        state.update({f"model.layers.{layer}.{name}.weight": value for name, value in parts.items()})
    return {name: np.ascontiguousarray(value) for name, value in state.items()}


def model_config(header: Header) -> dict[str, Any]:
    """config.json. BOS ends a text too: it is what this model was trained to write between two stories."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": BOS_ID,
        "eos_token_id": [BOS_ID, EOS_ID],
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": header.dim,
        "intermediate_size": header.hidden_dim,
        "max_position_embeddings": header.seq_len,
        "num_attention_heads": header.n_heads,
        "num_hidden_layers": header.n_layers,
        "num_key_value_heads": header.n_kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "vocab_size": header.vocab_size,
    }


def read_vocabulary(file: Path) -> list[tuple[str, float]]:
    """(token, score) by id. The export writes spaces as themselves and the special tokens with line feeds around."""
    data = file.read_bytes()
    offset = struct.calcsize("<i")  # the longest token's length, which nobody needs here
    vocabulary: list[tuple[str, float]] = []
    while offset < len(data):
        score, length = struct.unpack_from("<fi", data, offset)
        offset += struct.calcsize("<fi")
        token = data[offset : offset + length].decode()
        vocabulary.append((SPECIAL.get(len(vocabulary), token), score))
        offset += length
    return vocabulary


def derive_merges(vocabulary: list[tuple[str, float]]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, best score first: sentencepiece stores scores in place of merges."""
    scores = dict(vocabulary)
    merges: list[tuple[float, int, str, str]] = []
    for order, (token, score) in enumerate(vocabulary):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in scores and right in scores:
                merges.append((-score, order, left, right))
    merges.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in merges]


def build_tokenizer(vocabulary: list[tuple[str, float]]) -> Tokenizer:
    """llama2.c's tokenizer: a space before the text, characters merged by score, bytes for unknown characters."""
    ids = {token: index for index, (token, _) in enumerate(vocabulary)}
    model = models.BPE(
        vocab=ids, merges=derive_merges(vocabulary), unk_token=SPECIAL[0], fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", left=1, right=0)]
    )
    bos = SPECIAL[BOS_ID]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, BOS_ID)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL.values()])
    return tokenizer


def write_directory(directory: Path) -> None:
    """Fill `directory` with everything that transformers and Garnish read."""
    header, tensors = read_checkpoint(SOURCE / "stories260K.bin")
    save_file(to_hugging_face(header, tensors), directory / "model.safetensors", metadata={"format": "pt"})
    build_tokenizer(read_vocabulary(SOURCE / "tok512.bin")).save(str(directory / "tokenizer.json"))
    write_json(directory / "config.json", model_config(header))
    write_json(
        directory / "generation_config.json",
        {"bos_token_id": BOS_ID, "eos_token_id": [BOS_ID, EOS_ID], "do_sample": False},
    )
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL[BOS_ID],
            "eos_token": SPECIAL[EOS_ID],
            "unk_token": SPECIAL[0],
            "clean_up_tokenization_spaces": False,
            "model_max_length": header.seq_len,
        },
    )


def write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def receipt() -> dict[str, str]:
    """What the outcome depends on: the two source files and this script."""
    sources = [SOURCE / "stories260K.bin", SOURCE / "tok512.bin", Path(__file__)]
    return {source.name: hashlib.sha256(source.read_bytes()).hexdigest() for source in sources}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", type=Path, default=DEFAULT_TARGET)
    target: Path = parser.parse_args().target
    made_from = receipt()
    if is_published(target, made_from):
        print(f"{target} is up to date")
        return
    publish(target, made_from, write_directory)
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
