"""Checks of adapter_config.json: some fields are supported, some are ignored as harmless, and all others are refused
with a reason."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from adapters.errors import Problem

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILE = "tokenizer_config.json"
TEXT_FILES = {TEMPLATE_FILE: 1 << 20, TOKENIZER_FILE: 8 << 20}
"""Files next to an adapter that trainers save with the tokenizer, and their maximum bytes. They are optional."""
MAX_CONFIG_BYTES = 1 << 20
MAX_RANK = 512
MAX_PATTERNS = 2048
"""Maximum number of entries in one rank or alpha pattern. It is more than 7 x 256, the number of projections of a model
with 256 layers."""

SERVED = (
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "target_modules", "exclude_modules"),
    *("layers_to_transform", "layers_pattern", "peft_type", "task_type", "bias", "init_lora_weights"),
    *("fan_in_fan_out", "base_model_name_or_path"),
)
"""Fields that are read: they change the result, or have a separate check."""

HARMLESS = (
    # about the file or the training run; inference with the saved tensors does not depend on them
    *("peft_version", "revision", "auto_mapping", "inference_mode", "lora_dropout", "megatron_core"),
    # only read together with a field that is refused, or by an initialisation that training has since replaced
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "ensure_weight_tying"),
    "runtime_config",
)
"""Fields that are ignored, whatever their value."""

REFUSED = {
    "use_dora": "DoRA is not served yet: it rescales the base weights by a magnitude vector",
    "modules_to_save": "whole modules saved beside the adapter are not served: they replace parts of the base",
    "lora_bias": "bias vectors in LoRA B are not served",
    "alora_invocation_tokens": "activated LoRA (aLoRA) is not served: it turns on in the middle of a prompt",
    "use_qalora": "QALoRA is not served: it pools the inputs",
    "layer_replication": "layer replication is not served: it changes the number of the base's layers",
    "target_parameters": "LoRA on bare parameters is not served, only on linear modules",
    "trainable_token_indices": "trained token embeddings are not served: they change the base's vocabulary",
    "megatron_config": "Megatron's parallel layers are not served",
    "use_bdlora": "block-diagonal LoRA is not served",
    "arrow_config": "Arrow routing is not served",
    "kasa_config": "KaSA is not served: it truncates the base weights",
    "monteclora_config": "MonteCLoRA is not served",
    "velora_config": "VeLoRA is not served",
}
"""Fields that must be absent or have PEFT's default (None, False or empty), with the reason."""

# PEFT ignores the fields below. Those about the training run do not change a result, so they are ignored here too. A
# field of another LoRA library may describe another computation, so it is refused.

TRAINING = frozenset(
    (
        # ms-swift's own LoraConfig, and LoRA+
        *("lora_dtype", "lorap_lr_ratio", "lorap_emb_lr", "loraplus_lr_ratio", "loraplus_lr_embedding"),
        # PEFT before 0.3: merges for inference, which changes no result
        "merge_weights",
        # origin of the adapter
        *("_name_or_path", "_from_model_config", "model_name_or_path", "base_model_class", "parent_library"),
        *("library_name", "transformers_version", "torch_dtype", "dtype", "created_by", "trainer", "tags", "license"),
        *("quantization_config", "load_in_4bit", "load_in_8bit", "quantization_bit", "quantization_method"),
        # the run, as axolotl, LLaMA-Factory, TRL and transformers name it
        *("learning_rate", "lr", "lr_scheduler_type", "lr_scheduler", "optim", "optimizer", "weight_decay"),
        *("warmup_steps", "warmup_ratio", "num_train_epochs", "num_epochs", "epochs", "max_steps", "save_steps"),
        *("per_device_train_batch_size", "per_device_eval_batch_size", "micro_batch_size", "batch_size"),
        *("gradient_accumulation_steps", "gradient_checkpointing", "use_gradient_checkpointing", "max_grad_norm"),
        *("max_seq_length", "max_seq_len", "max_length", "sequence_len", "cutoff_len", "packing", "sample_packing"),
        *("seed", "random_state", "bf16", "fp16", "tf32", "flash_attention", "neftune_noise_alpha", "val_set_size"),
        *("stage", "finetuning_type", "train_type", "dataset", "datasets", "dataset_name", "dataset_dir", "template"),
        *("beta", "loss_type", "output_dir", "run_name", "report_to", "logging_steps"),
    )
)
"""Names of fields that concern only the training run."""

TRAINERS = ("axolotl_", "llamafactory_", "llama_factory_", "swift_", "trl_", "unsloth_", "wandb_")
"""Prefixes of fields that trainers add for their own use."""

OTHER_COMPUTATION = {
    "enable_lora": "LoRA on parts of a merged projection (PEFT before 0.3) is not served",
    "use_merged_linear": "LoRA on parts of a merged projection is not served",
    "use_qa_lora": "QALoRA is not served: it pools the inputs",
    "model_key_mapping": "its tensors are for modules that ms-swift renamed: export the adapter in PEFT's format",
    "additional_target": "whole modules trained beside the adapter are not served: they replace parts of the base",
    "lora_parameters": "an adapter of MLX, not of PEFT: its matrices are transposed and its scaling is another one",
}
"""Fields of other libraries that may change the result, with the reason for refusing them."""

MAX_NAMED = 20
_NUMBER = re.compile(r" *[0-9]{1,15}(?:\.[0-9]{1,15})? *", re.ASCII)

HARMLESS_INITS = (True, False, "gaussian", "eva", "orthogonal", "mica")
BASE_CHANGING_INITS = ("pissa", "corda", "olora", "loftq", "lora_ga")


class LoraSettings(msgspec.Struct, frozen=True):
    """Fields of adapter_config.json that decide which modules are adapted, and how."""

    rank: int
    alpha: float
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    use_rslora: bool
    target_modules: tuple[str, ...] | str | None
    """Module names, a regular expression or `all-linear`; None: PEFT's default for the base's architecture."""
    exclude_modules: tuple[str, ...] | str | None
    layers_to_transform: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]


def check_config(config: dict[str, Any]) -> tuple[LoraSettings | None, list[Problem], list[str]]:
    """Returns (settings, problems, warnings) of the config. `settings` is None if a field needed for them is
    unusable."""
    if (problem := _other_file(config)) is not None:
        return None, [problem], []
    refused, ignored = _check_remaining_fields(config)
    problems = [*_check_kind(config), *refused]
    warnings = [_ignored_warning(ignored)] if ignored else []
    if config.get("fan_in_fan_out"):
        warnings.append("fan_in_fan_out is ignored, as PEFT ignores it: the base's projections are Linear layers")
    reader = _Reader(config)
    settings = LoraSettings(
        rank=reader.rank("r", config.get("r", 8)),
        alpha=reader.number("lora_alpha", config.get("lora_alpha", 8)),
        rank_pattern=reader.pattern("rank_pattern", reader.rank),
        alpha_pattern=reader.pattern("alpha_pattern", reader.number),
        use_rslora=reader.flag("use_rslora"),
        target_modules=reader.modules("target_modules"),
        exclude_modules=reader.modules("exclude_modules"),
        layers_to_transform=reader.layers(),
        layers_pattern=reader.layers_pattern(),
    )
    reader.check_combination(settings)
    problems += reader.problems
    warnings += [_texts_warning(reader.texts)] if reader.texts else []
    return (None if reader.problems else settings), problems, warnings


def field_problem(field: str, problem: str, expected: str | None = None, actual: object = None) -> Problem:
    """Returns a Problem of a field of the config; `actual` is shortened."""
    shown = None if actual is None else repr(actual)[:200]
    return Problem(f"{CONFIG_FILE}#{field[:100]}", problem, expected, shown)


def stated_number(value: object) -> object:
    """Returns the number of a text such as "16" or "0.5"; any other value unchanged."""
    if not isinstance(value, str) or _NUMBER.fullmatch(value) is None:
        return value
    number = float(value)
    return int(number) if number.is_integer() else number


def with_numbers(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config with numbers in the place of texts that state ranks and alphas."""
    changed: dict[str, Any] = {name: stated_number(config[name]) for name in ("r", "lora_alpha") if name in config}
    for name in ("rank_pattern", "alpha_pattern"):
        if isinstance(config.get(name), dict):
            changed[name] = {key: stated_number(value) for key, value in config[name].items()}
    return config | changed


def _check_kind(config: dict[str, Any]) -> list[Problem]:
    problems: list[Problem] = []
    if config.get("peft_type") != "LORA":
        problems.append(field_problem("peft_type", "only LoRA is served", "'LORA'", config.get("peft_type", "nothing")))
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        reason = (
            "only causal language models are served; if the adapter was trained on one, and has no head of its own, "
            "write CAUSAL_LM here"
        )
        problems.append(field_problem("task_type", reason, "'CAUSAL_LM'", config["task_type"]))
    if config.get("bias", "none") != "none":
        problems.append(field_problem("bias", "trained biases are not served", "'none'", config["bias"]))
    init = config.get("init_lora_weights", True)
    init = False if init is None else init  # as PEFT reads it
    if isinstance(init, str) and init.lower().startswith(BASE_CHANGING_INITS):
        reason = (
            "this initialisation changes the base weights; convert the adapter with PEFT's save_pretrained(..., "
            "path_initial_model_for_weight_conversion=...)"
        )
        problems.append(field_problem("init_lora_weights", reason, "true", init))
    elif not (isinstance(init, bool) or (isinstance(init, str) and init.lower() in HARMLESS_INITS)):
        problems.append(field_problem("init_lora_weights", "unknown initialisation", "true", init))
    name = config.get("base_model_name_or_path")
    if name is not None and not isinstance(name, str):
        problems.append(field_problem("base_model_name_or_path", "wrong type", "a string or null", name))
    return problems


def _other_file(config: dict[str, Any]) -> Problem | None:
    """Returns the problem of a file that is clearly not a PEFT adapter's config; None for others. It replaces the
    problems of all its fields."""
    if "peft_type" in config:
        return None
    if "architectures" in config or "hidden_size" in config:
        return Problem(CONFIG_FILE, "a whole model's config.json, not an adapter's: deploy PEFT's adapter_config.json")
    if "lora_parameters" in config:
        return field_problem("lora_parameters", OTHER_COMPUTATION["lora_parameters"])
    return None


def _check_remaining_fields(config: dict[str, Any]) -> tuple[list[Problem], list[str]]:
    """Returns (problems, names of ignored fields) for the fields that are neither supported nor harmless."""
    problems: list[Problem] = []
    ignored: list[str] = []
    for field, value in config.items():
        if field in SERVED or field in HARMLESS or value is None or value is False or value in ([], {}, ""):
            continue
        if _is_training_note(field):
            ignored.append(field)
            continue
        unknown = "this field is not known, so it can't be ignored safely; remove it if it only concerned training"
        reason = REFUSED.get(field) or OTHER_COMPUTATION.get(field, unknown)
        problems.append(field_problem(field, reason, "PEFT's default", value))
    return problems, ignored


def _is_training_note(field: str) -> bool:
    """Returns whether a field that PEFT does not read can be ignored."""
    return field in TRAINING or field.startswith(TRAINERS)


def _ignored_warning(fields: list[str]) -> str:
    """Returns one warning that names the ignored fields."""
    return f"{_listed(fields)} ignored: only the training run is concerned"


def _texts_warning(fields: list[str]) -> str:
    """Returns one warning that names the fields whose numbers are texts."""
    return f"{_listed(fields)} written as text, and read as the number in it"


def _listed(fields: list[str]) -> str:
    """Returns the fields' names, MAX_NAMED at most, as the beginning of a sentence."""
    names = ", ".join(field[:100] for field in fields[:MAX_NAMED])
    more = f" and {len(fields) - MAX_NAMED} more" if len(fields) > MAX_NAMED else ""
    return f"{names}{more} in {CONFIG_FILE} {'is' if len(fields) == 1 else 'are'}"


class _Reader:
    """Reader of typed fields, which collects the problems."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.problems: list[Problem] = []
        self.texts: list[str] = []
        """Fields whose number is written as a text."""

    def wrong(self, field: str, problem: str, expected: str, value: object) -> None:
        self.problems.append(field_problem(field, problem, expected, value))

    def _stated_number(self, field: str, value: object) -> object:
        """Returns the number that a text such as "16" states, and records the field; any other value unchanged."""
        number = stated_number(value)
        if number is not value:
            self.texts.append(field)
        return number

    def rank(self, field: str, value: object) -> int:
        value = self._stated_number(field, value)
        if type(value) is int and 1 <= value <= MAX_RANK:
            return value
        self.wrong(field, "unusable rank", f"an integer from 1 to {MAX_RANK}", value)
        return 1

    def number(self, field: str, value: object) -> float:
        value = self._stated_number(field, value)
        # Nodes compute in float32, so the scale must be a finite float32.
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30:
            return float(value)
        self.wrong(field, "unusable alpha", "a number below 1e30", value)
        return 1.0

    def flag(self, field: str) -> bool:
        value = self.config.get(field, False)
        value = False if value is None else value  # as PEFT reads it
        if not isinstance(value, bool):
            self.wrong(field, "wrong type", "true or false", value)
        return value is True

    def pattern(self, field: str, read: Any) -> dict[str, Any]:
        value = self.config.get(field)
        if value is None:
            return {}
        if not isinstance(value, dict) or len(value) > MAX_PATTERNS:
            self.wrong(field, "wrong type or size", f"an object of at most {MAX_PATTERNS} patterns", value)
            return {}
        return {key: read(f"{field}.{key}", item) for key, item in value.items()}

    def modules(self, field: str) -> tuple[str, ...] | str | None:
        value = self.config.get(field)
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, list) and len(value) <= MAX_PATTERNS and all(isinstance(item, str) for item in value):
            return tuple(value)
        self.wrong(field, "wrong type or size", f"a string or a list of at most {MAX_PATTERNS} strings", value)
        return None

    def layers(self) -> tuple[int, ...] | None:
        value = self.config.get("layers_to_transform")
        if value is None or value == []:
            return None
        items = value if isinstance(value, list) else [value]
        if len(items) <= MAX_PATTERNS and all(type(item) is int for item in items):
            return tuple(items)
        self.wrong("layers_to_transform", "wrong type or size", "an integer or a list of integers", value)
        return None

    def layers_pattern(self) -> tuple[str, ...]:
        value = self.modules("layers_pattern")
        if not value:
            return ()
        return (value,) if isinstance(value, str) else value

    def check_combination(self, settings: LoraSettings) -> None:
        """Adds problems for combinations of fields that PEFT itself refuses to load."""
        if isinstance(settings.target_modules, str) and settings.layers_to_transform is not None:
            self.wrong(
                "layers_to_transform",
                "needs a list of target_modules",
                "null",
                settings.layers_to_transform,
            )
        if settings.layers_pattern and settings.layers_to_transform is None:
            self.wrong("layers_pattern", "needs layers_to_transform", "both or none", settings.layers_pattern)


def scale(alpha: float, rank: int, use_rslora: bool) -> float:
    """Returns the LoRA scaling factor of (xA)B: alpha / r, or alpha / sqrt(r) for rsLoRA."""
    return alpha / math.sqrt(rank) if use_rslora else alpha / rank
