"""The list of what the gateway serves: a module of routes that is not here answers 404."""

from __future__ import annotations

from gateway.routes import (
    aliases,
    batches,
    cluster,
    deploy,
    docs,
    explain,
    files,
    functions,
    health,
    invoke,
    metrics,
    nodes,
    openai,
    pools,
    tenants,
    tokens,
    usage,
    warm,
)

CALLED = (invoke, openai, files, batches, tokens, deploy, functions, aliases, warm)
OPERATED = (health, metrics, cluster, nodes, pools, tenants, usage, explain, docs)
ALL = [operation for module in (*CALLED, *OPERATED) for operation in module.routes]
"""In the order in which openapi.json has them."""
