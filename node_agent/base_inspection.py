"""The process that reads the modules of a base model from its config.json: `python -m node_agent.base_inspection DIR`.

The model is made by transformers on torch's meta device, so that no weights are read and no memory is taken. The answer
(adapters.base_manifest.InspectedBase) is one line of JSON on standard output, and a reason for a refusal is the last
line on standard error.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from adapters.base_manifest import InspectedBase
from adapters.modules import EMBEDDING, EXPERTS, LINEAR, Module

EXPERT_DIMENSIONS = 3
"""Number of dimensions of a parameter with the weights of several experts."""


class NotInspected(ValueError):
    """The model can't be made from its config.json."""


def inspect_base(directory: Path) -> InspectedBase:
    """Returns what the base's config.json says of its modules. Raises NotInspected."""
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        architecture = _architecture(config, transformers)
        with torch.device("meta"):
            model = architecture._from_config(config)
    except NotInspected:
        raise
    except Exception as error:  # transformers raises any class for a config that it can't use
        raise NotInspected(f"{directory}: transformers {transformers.__version__} can't make it: {error}") from error
    text = config.get_text_config()
    names = {id(module): name for name, module in model.named_modules()}
    head, decoder = model.get_output_embeddings(), _decoder(model)
    return InspectedBase(
        architecture=architecture.__name__,
        model_type=config.model_type,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        max_context=text.max_position_embeddings,
        kv_elements=_kv_elements(text),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        output="" if head is None else names[id(head)],
        decoder=names[id(decoder)],
        modules=tuple(_module(name, module, torch) for name, module in model.named_modules() if name),
    )


def _architecture(config: Any, transformers: Any) -> Any:
    """Returns the class that config.json names. Raises NotInspected unless it generates text."""
    names = list(config.architectures or ())
    architecture = getattr(transformers, names[0], None) if names else None
    if architecture is None:
        reason = (
            f"config.json names the architectures {names}; transformers {transformers.__version__} has no such class"
        )
        raise NotInspected(reason)
    if not architecture.can_generate():
        raise NotInspected(f"config.json names {names[0]}, which generates no text")
    return architecture


def _decoder(model: Any) -> Any:
    """Returns the module that has the language model's layers."""
    return model.get_decoder() if hasattr(model, "get_decoder") else model.base_model


def _kv_elements(text: Any) -> int:
    """Returns the key and value elements of one token, over the layers whose attention sees all tokens."""
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    layers = sum(kind == "full_attention" for kind in kinds)
    compressed = getattr(text, "kv_lora_rank", None)
    if compressed:  # multi-head latent attention keeps one vector for both
        return int(layers * (compressed + text.qk_rope_head_dim))
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * layers * heads * width)


def _module(name: str, module: Any, torch: Any) -> Module:
    parameters = {key: tuple(each.shape) for key, each in module.named_parameters(recurse=False)}
    kind = ""
    if isinstance(module, torch.nn.Linear):
        kind = LINEAR
    elif isinstance(module, torch.nn.Embedding):
        kind = EMBEDDING
    elif any(
        len(shape) >= EXPERT_DIMENSIONS and "conv" not in type(module).__name__.lower() for shape in parameters.values()
    ):
        kind = EXPERTS
    return Module(name, kind, parameters)


def main() -> int:
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print there
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        inspected = inspect_base(Path(sys.argv[1]))
    except (NotInspected, ImportError) as error:
        sys.stderr.write(f"{error}".replace("\n", " ") + "\n")
        return 1
    with output:
        output.write(msgspec.json.encode(inspected) + b"\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
