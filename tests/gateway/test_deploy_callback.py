"""The callback that deploys at each save, in transformers' own trainer with a PEFT model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from running_gateway import Running
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from garnish.client import Client
from garnish.errors import GarnishError
from garnish.train import DeployCallback
from tests.support.ports import free_port

STEPS, SAVE_STEPS = 6, 2


def trainer(base: Path, folder: Path, callback: DeployCallback, **fields: Any) -> Trainer:
    torch.manual_seed(0)
    model: Any = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    )
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 400, (24, 12)).tolist()]
    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, save_steps=SAVE_STEPS, save_strategy="steps", learning_rate=1e-2,
        lr_scheduler_type="constant", per_device_train_batch_size=4, use_cpu=True, report_to=[], disable_tqdm=True,
        save_only_model=True, **fields,
    )  # fmt: skip
    data: Any = rows[:16], rows[16:]
    return Trainer(model, arguments, train_dataset=data[0], eval_dataset=data[1], callbacks=[callback])


@pytest.mark.parametrize(("greater", "best"), [(None, 3), (True, 1)])
def test_each_save_is_a_version_and_the_alias_follows_the_metric(
    reused: Running, stories_dir: Path, tmp_path: Path, greater: bool | None, best: int
) -> None:
    """The loss falls with each step."""
    with Client(reused.url, reused.keys["acme"]) as client:
        callback = DeployCallback("mine", alias="best", metric="eval_loss", greater_is_better=greater, client=client)
        training = trainer(stories_dir, tmp_path, callback, eval_strategy="steps", eval_steps=SAVE_STEPS)
        training.train()
        versions = client.versions("mine").versions
        assert sorted(each.version for each in versions) == [1, 2, 3]
        for each in versions:
            checkpoint = tmp_path / f"checkpoint-{SAVE_STEPS * each.version}"
            assert client.deploy("mine", checkpoint, dry_run=True).digest == each.digest
        losses = [entry["eval_loss"] for entry in training.state.log_history if "eval_loss" in entry]
        assert losses == sorted(losses, reverse=True) and len(losses) == 3
        assert client.alias("mine", "best").version == best
        assert client.alias("mine", "latest").version == 3


def test_without_a_metric_the_alias_follows_each_save(reused: Running, stories_dir: Path, tmp_path: Path) -> None:
    with Client(reused.url, reused.keys["acme"]) as client:
        trainer(stories_dir, tmp_path, DeployCallback("mine", alias="next", client=client)).train()
        assert client.alias("mine", "next").version == 3


def test_a_step_without_the_metric_moves_no_alias(
    reused: Running, stories_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(reused.url, reused.keys["acme"]) as client, caplog.at_level(logging.WARNING, "garnish.train"):
        trainer(stories_dir, tmp_path, DeployCallback("mine", alias="best", metric="eval_f1", client=client)).train()
        assert len(client.versions("mine").versions) == 3
        with pytest.raises(GarnishError, match="best"):
            client.alias("mine", "best")
    assert "step 2 has no eval_f1, so best stays" in caplog.text


def test_a_resumed_training_knows_the_best_value_so_far(reused: Running, stories_dir: Path, tmp_path: Path) -> None:
    with Client(reused.url, reused.keys["acme"]) as client:
        evaluated = {"eval_strategy": "steps", "eval_steps": SAVE_STEPS}
        first = trainer(stories_dir, tmp_path, DeployCallback("mine", client=client), **evaluated)
        first.train()
        callback = DeployCallback("mine", alias="best", metric="eval_loss", client=client)
        first.state.log_history.append({"eval_loss": 0.0, "step": STEPS})
        callback.on_train_begin(first.args, first.state, first.control)
        callback.on_save(first.args, first.state, first.control)
        with pytest.raises(GarnishError, match="best"):
            client.alias("mine", "best")


def test_a_service_that_is_away_ends_only_a_training_that_requires_it(
    stories_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(f"http://127.0.0.1:{free_port()}", "gsk_acme_x") as client:
        training = trainer(stories_dir, tmp_path / "a", DeployCallback("mine", client=client))
        with caplog.at_level(logging.WARNING, "garnish.train"):
            training.train()
        assert training.state.global_step == STEPS
        assert "step 6 is not deployed: unreachable: nothing answers at" in caplog.text
        with pytest.raises(GarnishError, match="nothing answers at"):
            trainer(stories_dir, tmp_path / "b", DeployCallback("mine", client=client, required=True)).train()


def test_a_metric_needs_an_alias() -> None:
    with pytest.raises(ValueError, match="state alias"):
        DeployCallback("mine", metric="eval_loss")


def test_a_loss_that_is_no_number_moves_no_alias(reused: Running, stories_dir: Path, tmp_path: Path) -> None:
    with Client(reused.url, reused.keys["acme"]) as client:
        training = trainer(stories_dir, tmp_path, DeployCallback("mine", client=client))
        training.train()
        callback = DeployCallback("mine", alias="best", metric="eval_loss", client=client)
        for loss, moves in ((float("nan"), False), (2.0, True)):
            training.state.log_history.append({"eval_loss": loss, "step": STEPS})
            callback.on_save(training.args, training.state, training.control)
            if moves:
                assert client.alias("mine", "best").version == 3
            else:
                with pytest.raises(GarnishError, match="best"):
                    client.alias("mine", "best")
