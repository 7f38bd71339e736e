"""Messages about files and batches, compatible with OpenAI's clients."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_METADATA = 16
WINDOW_SECONDS = 86_400.0

Endpoint = Literal["/v1/completions", "/v1/chat/completions", "/invoke"]
Purpose = Literal["batch", "batch_output"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})
MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=MAX_METADATA)]


class FileObject(msgspec.Struct, frozen=True):
    """File of a tenant. Times are Unix time in whole seconds."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    expires_at: int | None = None
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class FileList(msgspec.Struct, frozen=True):
    data: list[FileObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class FileDeleted(msgspec.Struct, frozen=True):
    id: str
    deleted: bool = True
    object: Literal["file"] = "file"


class BatchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request to create a batch. `input_file_id` is the id of a file with the purpose `batch`. Each line of the file is
    a call with a `custom_id`."""

    input_file_id: Annotated[str, Meta(max_length=64)]
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


class RequestCounts(msgspec.Struct, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchProblem(msgspec.Struct, frozen=True):
    """Problem of a batch. `line` is the line of the input file, counted from 1; null for a problem of the batch
    itself."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchProblems(msgspec.Struct, frozen=True):
    data: list[BatchProblem]
    object: Literal["list"] = "list"


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Batch of calls. Times are Unix time in whole seconds; null for a status that the batch has not had."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Endpoint
    errors: BatchProblems | None = None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: Metadata | None = None


class BatchList(msgspec.Struct, frozen=True):
    data: list[Batch]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"
