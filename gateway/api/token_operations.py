"""The routes /tokenize and /detokenize as openapi.json lists them."""

from __future__ import annotations

from gateway.api.token_schema import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest
from gateway.http.operations import TENANT, Operation

_ERRORS = (400, 401, 403, 404, 413, 415, 422, 429, 499, 500, 503, 504)

TOKEN_OPERATIONS = (
    Operation(
        method="post",
        path="/tokenize",
        id="tokenize",
        summary="The token ids of a prompt or a conversation, as a call would have them",
        parameters=(TENANT,),
        body=TokenizeRequest,
        replies={200: TokenizeReply},
        errors=_ERRORS,
    ),
    Operation(
        method="post",
        path="/detokenize",
        id="detokenize",
        summary="The text of token ids, special tokens included",
        parameters=(TENANT,),
        body=DetokenizeRequest,
        replies={200: DetokenizeReply},
        errors=_ERRORS,
    ),
)
