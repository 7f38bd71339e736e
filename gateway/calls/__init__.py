"""The path of a call, from its checked request to its last token.

`request` prepares it: the prompt becomes tokens, and all defaults are filled in. `dispatch` routes it and follows it
across nodes. `reply` formats the answer of native routes, and `openai_reply` that of /v1.
"""
