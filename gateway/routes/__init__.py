"""Modules of public routes, one per group: handlers, their messages, and their descriptions in `openapi.json`."""
