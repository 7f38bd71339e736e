"""The public HTTP service. A request enters in `routes/`, is resolved, placed by `scheduling/` and relayed to a node.

`app.create_app` builds the Starlette application; `server` runs it under gunicorn. No module here imports torch.
"""
