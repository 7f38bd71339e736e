"""Fields of adapter_config.json that PEFT does not read: which of them may be ignored, and which may not.

PEFT drops what it does not know. A trainer's note about the run is as harmless to a result here as there; a field of
another LoRA library may describe another computation, so it is refused.
"""

from __future__ import annotations

TRAINING = frozenset(
    (
        # ms-swift's own LoraConfig, and LoRA+
        *("lora_dtype", "lorap_lr_ratio", "lorap_emb_lr", "loraplus_lr_ratio", "loraplus_lr_embedding"),
        # PEFT before 0.3: merges for inference, which changes no result
        "merge_weights",
        # where it came from
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
"""Names of what only concerned the training run."""

TRAINERS = ("axolotl_", "llamafactory_", "llama_factory_", "swift_", "trl_", "unsloth_", "wandb_")
"""Beginnings of names that a trainer gave to notes of its own."""

OTHER_COMPUTATION = {
    "enable_lora": "LoRA on parts of a merged projection (PEFT before 0.3) is not served",
    "use_merged_linear": "LoRA on parts of a merged projection is not served",
    "use_qa_lora": "QALoRA is not served: it pools the inputs",
    "model_key_mapping": "its tensors are for modules that ms-swift renamed: export the adapter in PEFT's format",
    "additional_target": "whole modules trained beside the adapter are not served: they replace parts of the base",
    "lora_parameters": "an adapter of MLX, not of PEFT: its matrices are transposed and its scaling is another one",
}
"""Fields of other libraries that may change the result, with the reason."""

MAX_NAMED = 20


def is_training_note(field: str) -> bool:
    """Whether a field that PEFT does not read can be ignored."""
    return field in TRAINING or field.startswith(TRAINERS)


def ignored_warning(fields: list[str]) -> str:
    """Returns one warning that names the ignored fields, MAX_NAMED at most."""
    named = ", ".join(field[:100] for field in fields[:MAX_NAMED])
    more = f" and {len(fields) - MAX_NAMED} more" if len(fields) > MAX_NAMED else ""
    verb = "is" if len(fields) == 1 else "are"
    return f"{named}{more} in adapter_config.json {verb} ignored: only the training run is concerned"
