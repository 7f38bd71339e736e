"""List of all routes. A module that is not listed here answers 404."""

from __future__ import annotations

from gateway.routes import (
    aliases,
    batches,
    cluster,
    console,
    deploy,
    docs,
    explain,
    files,
    functions,
    health,
    invocations,
    invoke,
    metrics,
    nodes,
    openai,
    pools,
    tenants,
    tokens,
    usage,
    vllm_adapters,
    warm,
    webhook_secrets,
)

CALLED = (invoke, invocations, openai, files, batches, tokens, deploy, vllm_adapters, functions, aliases, warm)
OPERATED = (health, metrics, cluster, nodes, pools, tenants, webhook_secrets, usage, explain, docs, console)
ALL = [operation for module in (*CALLED, *OPERATED) for operation in module.routes]
