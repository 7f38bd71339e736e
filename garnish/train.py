"""Deploys an adapter at each save of its training: a callback for the trainers of transformers and TRL.

Only training scripts import this module, because it needs transformers.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from garnish.client import Client
from garnish.errors import GarnishError

log = logging.getLogger("garnish.train")


class DeployCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Deploys each checkpoint of a PEFT model as the next version of a function, to which `latest` points.

    The trainer waits for each deploy. Of several processes only the first one deploys.
    """

    def __init__(
        self,
        function: str,
        *,
        alias: str | None = None,
        metric: str | None = None,
        greater_is_better: bool | None = None,
        client: Client | None = None,
        required: bool = False,
    ) -> None:
        """Prepares the deploys; training may begin before the service is reachable.

        `alias` is pointed to each version, too, or, with `metric`, to versions that improve it: the metric's name as
        the trainer logs it (`eval_loss`). `greater_is_better` is by default False for names that end with `loss`, and
        True for others, as in transformers. `client` is by default one of the environment (`garnish.Client`). With
        `required` a failed deploy ends the training; otherwise it is logged. Raises ValueError for a metric without
        an alias, and GarnishError without a usable connection.
        """
        if metric is not None and alias is None:
            raise ValueError("metric chooses the versions that an alias points to: state alias, too")
        self._function, self._alias, self._metric, self._required = function, alias, metric, required
        loses = metric is not None and metric.endswith("loss")
        self._sign = 1.0 if (not loses if greater_is_better is None else greater_is_better) else -1.0
        self._client = client or Client()
        self._best: float | None = None
        """Best value of the metric so far, with its sign changed if less is better."""

    def on_train_begin(
        self,
        args: TrainingArguments,  # noqa: ARG002 - the trainer gives all of them
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Takes the best value from the log of a training that is resumed."""
        values = [self._value(entry) for entry in self._evaluations(state)]
        self._best = max((value for value in values if not math.isnan(value)), default=None)

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        if not state.is_world_process_zero:
            return
        assert args.output_dir is not None  # the trainer has just saved there
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        value = self._last_value(state)
        improves = self._metric is None or (value is not None and self._is_best(value))
        alias = self._alias if improves else None
        try:
            version = self._client.deploy(self._function, checkpoint).version
            assert version is not None  # only a dry run has none
            if alias is not None:
                self._client.set_alias(self._function, alias, version)
        except GarnishError as error:
            if self._required:
                raise
            log.warning("step %d is not deployed: %s", state.global_step, error)
            return
        if improves:
            self._best = value
        pointed = f", {alias} points to it" if alias else ""
        log.info("step %d is version %s of %s%s", state.global_step, version, self._function, pointed)

    def _is_best(self, value: float) -> bool:
        """Returns whether the value is the best so far. NaN, of a training that diverges, is not."""
        return not math.isnan(value) and (self._best is None or value > self._best)

    def _last_value(self, state: TrainerState) -> float | None:
        """Returns the metric at this step; None, with a warning, if the step was not evaluated."""
        if self._metric is None:
            return None
        for entry in reversed(self._evaluations(state)):
            if entry.get("step") == state.global_step:
                return self._value(entry)
        log.warning(
            "step %d has no %s, so %s stays: evaluate whenever you save (eval_strategy, eval_steps)",
            state.global_step,
            self._metric,
            self._alias,
        )
        return None

    def _evaluations(self, state: TrainerState) -> list[dict[str, Any]]:
        return [entry for entry in state.log_history if self._metric in entry]

    def _value(self, entry: dict[str, Any]) -> float:
        return self._sign * float(entry[str(self._metric)])
