"""The public HTTP service of the gateway.

A request enters in `routes/`. Its function is resolved by `catalog/`, `scheduling/` chooses a node, and `calls/` relays
the request to it. `app.create_app` builds the Starlette application; `server` runs it under gunicorn. No module here
imports torch.
"""
