"""What `model` names in OpenAI's and vLLM's requests: a function, one version of it, or the base model."""

from __future__ import annotations

from adapters.functions import Policy
from gateway.services import Services


def split_model(services: Services, model: str) -> tuple[str, str | None]:
    """Name and qualifier (an alias or a version; None where none is stated) of `model`."""
    if model == services.base.id:
        return model, None
    name, colon, qualifier = model.partition(":")
    # An empty qualifier names nothing, which is not the same as none.
    return name, (qualifier or ":") if colon else None


async def policy_of(services: Services, tenant: str, model: str) -> Policy:
    """Returns the policy of the function that `model` names; the base has none of its own. Raises NotFound unless a
    call of the tenant could name it."""
    if model == services.base.id:
        return Policy()
    choices = await services.functions.choices(tenant, *split_model(services, model))
    return choices[0].version.policy
