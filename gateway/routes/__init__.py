"""One module per group of public routes: handlers, their messages, and how `openapi.json` describes them."""
