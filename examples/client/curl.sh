#!/usr/bin/env bash
# Deploy, call, stream and delete an adapter with curl. Start `make up` first, then:
#
#     URL=http://127.0.0.1:8080 KEY=<a tenant key that it printed> bash examples/client/curl.sh
set -euo pipefail
: "${URL:?the gateway, for instance http://127.0.0.1:8080}" "${KEY:?a tenant key, printed by make up}"
adapter="$(dirname "$0")/../adapters/SmolLM2-135M-Instruct/pirate"
auth=(-sS --fail-with-body -H "Authorization: Bearer $KEY")

echo "# deploy"
curl "${auth[@]}" "$URL/deploy/curl-pirate" \
    -F "adapter_config.json=@$adapter/adapter_config.json" \
    -F "adapter_model.safetensors=@$adapter/adapter_model.safetensors"

ask='{"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 48, "temperature": 0}'
printf '\n\n# invoke\n'
curl "${auth[@]}" "$URL/invoke/curl-pirate" --json "$ask"

printf '\n\n# stream\n'
curl "${auth[@]}" -N "$URL/invoke/curl-pirate" --json "$ask" -H 'Accept: text/event-stream'

printf '\n# delete\n'
curl "${auth[@]}" -X DELETE "$URL/functions/curl-pirate" -w 'HTTP %{http_code}\n'
