"""Normalisation of tensor names in an adapter, and recognition of files that are not PEFT adapters."""

from __future__ import annotations

import re

import msgspec

from adapters.errors import InvalidAdapter, Problem
from adapters.peft_config import WEIGHTS_FILE
from adapters.peft_format import PeftAdapter, TensorRef

_PLAIN = re.compile(r"base_model\.model\..+\.lora_[AB]\.weight", re.ASCII)
_NAMED = re.compile(r"(?P<module>base_model\.model\..+\.lora_[AB])\.(?P<adapter>[^.]{1,200})\.weight")
PEFT_NAME = "base_model.model.<module>.lora_A.weight"


def with_plain_names(adapter: PeftAdapter) -> PeftAdapter:
    """Returns the adapter with tensors named as by PEFT's `save_pretrained`.

    PEFT's `model.state_dict()` includes the adapter's name (`lora_A.default.weight`). It is removed if all tensors have
    the same one. Raises InvalidAdapter, with one problem, when they do not, or when the file is clearly not a PEFT
    adapter.
    """
    _refuse_other_files(list(adapter.tensors))
    carried = {name: match for name in adapter.tensors if (match := _NAMED.fullmatch(name))}
    if not carried:
        return adapter
    adapters = sorted({match["adapter"] for match in carried.values()})
    if len(adapters) > 1:
        names = ", ".join(adapters[:5])
        raise _refused(
            WEIGHTS_FILE,
            f"it holds tensors of {len(adapters)} adapters ({names}): save one, with PEFT's "
            "save_pretrained(FOLDER, selected_adapters=[NAME])",
        )
    if any(_PLAIN.fullmatch(name) for name in adapter.tensors):
        raise _refused(
            next(iter(carried))[:300],
            f"its name carries an adapter's name ({adapters[0]}) and other tensors' names do not: "
            "save the adapter with PEFT's save_pretrained",
        )
    tensors: dict[str, TensorRef] = {}
    for name, ref in adapter.tensors.items():
        plain = f"{carried[name]['module']}.weight" if name in carried else name
        tensors[plain] = msgspec.structs.replace(ref, name=plain)
    return msgspec.structs.replace(adapter, tensors=tensors)


def plain_name(name: str) -> str:
    """Returns the tensor's name without an adapter's name."""
    carried = _NAMED.fullmatch(name)
    return name if carried is None else f"{carried['module']}.weight"


def _refuse_other_files(names: list[str]) -> None:
    """Raises InvalidAdapter, with one problem, if the tensors' names show that the file is not a PEFT adapter."""
    if not names:
        raise _refused(WEIGHTS_FILE, "it holds no tensors: training may have been stopped before it saved any")
    if any(name.endswith("_proj.base_layer.weight") for name in names):
        problem = "it holds the base model's weights beside the adapter's: save it with PEFT's save_pretrained"
    elif all("lora" not in name.lower() for name in names) and any(".layers." in name for name in names):
        problem = (
            f"a whole model's weights ({len(names)} tensors, no LoRA among them), not an adapter's: serve it as "
            "base_model, or deploy the adapter that was merged into it"
        )
    elif all(name.endswith((".lora_a", ".lora_b")) for name in names):
        problem = "an adapter of MLX, not of PEFT: its matrices are transposed and its scaling is another one"
    elif not any(name.startswith("base_model.model.") for name in names):
        problem = f"none of its {len(names)} tensors is named as PEFT names them; the first is {names[0][:100]}"
    else:
        return
    raise InvalidAdapter([Problem(WEIGHTS_FILE, problem, PEFT_NAME, names[0][:100])])


def _refused(where: str, problem: str) -> InvalidAdapter:
    return InvalidAdapter([Problem(where, problem)])
