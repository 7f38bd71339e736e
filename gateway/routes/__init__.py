"""Modules of public routes, one per group: handlers, their messages, and how `openapi.json` describes them."""
