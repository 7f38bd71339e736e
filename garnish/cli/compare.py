"""`garnish compare NAME --peft`: compares the function's answers with those of transformers and PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from garnish.cli.options import DEFAULT_FILE, File, Output, TenantService
from garnish.errors import FrontDoorError
from garnish.screen import Column, Screen

if TYPE_CHECKING:
    from garnish.comparison import Comparison, Row

DEFAULT_PROMPTS = (
    "What is the capital of France?",
    "Once upon a time, there was a little girl named",
    "My parcel has not arrived yet. What can I do?",
    "List three colours.",
)
MAX_PROMPTS = 1000
MAX_PROMPT_BYTES = 1 << 20
PROMPT_WIDTH = 32


def compare(
    service: TenantService,
    output: Output,
    name: Annotated[str, typer.Argument(help="NAME, NAME:ALIAS or NAME:VERSION.")],
    peft: Annotated[bool, typer.Option("--peft", help="With transformers and PEFT alone, on this host.")] = False,
    prompts: Annotated[Path | None, typer.Option("--prompts", help="A file with a prompt per line.")] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="As a user's message (default: where there is a template).")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, max=4096, help="Of each answer.")] = 24,
    adapter: Annotated[
        Path | None, typer.Option("--adapter", help="The folder that was deployed (default: from the registry).")
    ] = None,
    file: File = DEFAULT_FILE,
) -> None:
    """Send the same prompts to a function and to PEFT, greedily, and compare every token. Exit code 1: they differ.

    PEFT runs in a separate process, in the node's dtype, with the base model of the service file. It needs memory for a
    second copy of that model. If PEFT's largest logits differ by no more than rounding, either token is correct: a tie.
    """
    from garnish.comparison import ComparisonRequest, check_installed, run_comparison
    from garnish.config import load_service_file

    if not peft:
        raise typer.BadParameter("expected --peft: what to compare with")
    check_installed()
    request = ComparisonRequest(
        name=name,
        prompts=list(DEFAULT_PROMPTS) if prompts is None else read_prompts(prompts),
        chat=chat,
        max_tokens=max_tokens,
        adapter=adapter,
        state=service.state,
    )
    declared = load_service_file(file)
    with output.screen() as screen, service.client(service.tenant) as client:
        comparison = run_comparison(request, declared, client, screen.progress)
        screen.end_progress()
        show(comparison, screen)
        screen.result(comparison)
    if not comparison.equal:
        raise typer.Exit(1)


def read_prompts(file: Path) -> list[str]:
    """Returns the file's lines that are not blank.

    Raises FrontDoorError if the file can't be read, or if it has too many such lines or none.
    """
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_PROMPT_BYTES + 1)
        prompts = [line.strip() for line in data.decode("utf-8-sig").splitlines() if line.strip()]
    except OSError as error:
        raise FrontDoorError(f"{file} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise FrontDoorError(f"{file} is not UTF-8") from None
    if len(data) > MAX_PROMPT_BYTES or not 1 <= len(prompts) <= MAX_PROMPTS:
        raise FrontDoorError(f"{file}: expected 1 to {MAX_PROMPTS} lines, a prompt each, of {MAX_PROMPT_BYTES} bytes")
    return prompts


COLUMNS = (
    Column("PROMPT", min_width=12, cut=True),
    *(Column(name, number=True) for name in ("TOKENS", "EQUAL", "LOGPROB DIFF", "FUNCTION", "PEFT")),
)


def show(comparison: Comparison, screen: Screen) -> None:
    rows = [
        [
            _shortened(row.prompt),
            str(row.tokens),
            str(row.tokens - len(row.differences)),
            f"{row.logprob_difference:.1e}",
            f"{row.function_seconds:.2f} s",
            f"{row.peft_seconds:.2f} s",
        ]
        for row in comparison.rows
    ]
    screen.table(COLUMNS, rows)
    for row in comparison.rows:
        _show_differences(row, screen)
    agree = "write the same" if comparison.equal else "DIFFER"
    ties = f", {comparison.ties} at ties" if comparison.ties else ""
    screen.line(
        f"{comparison.function} and PEFT alone ({comparison.dtype} on {comparison.device}) {agree}: "
        f"{comparison.tokens_equal} of {comparison.tokens} tokens equal{ties}"
    )
    screen.line(
        f"largest difference of log probabilities: {comparison.logprob_difference:.1e} "
        "(of the 20 most likely tokens at each position)"
    )
    screen.line(
        f"seconds: {comparison.function_seconds:.2f} by the function, over HTTP, call after call; "
        f"{comparison.peft_seconds:.2f} by PEFT, and {comparison.peft_load_seconds:.1f} to load"
    )


def _show_differences(row: Row, screen: Screen) -> None:
    ours, theirs = row.prompt_tokens
    if ours != theirs:
        screen.line(f"{_shortened(row.prompt)}: {ours} prompt tokens by the service, {theirs} by transformers")
    for entry in row.differences:
        verdict = "a tie" if entry.is_tie else "NO tie"
        screen.line(
            f"{_shortened(row.prompt)}: token {entry.position + 1} is {entry.function_token}, "
            f"PEFT's best after the same ones {entry.peft_token}; in PEFT's logits {entry.behind:.2g} apart: {verdict} "
            f"(below {entry.tie_below:.2g}), its two best {entry.gap:.2g} apart"
        )
    if row.differences and row.function_text == row.peft_text:
        screen.line(f"  both, generating: {row.function_text.strip()}")
    elif row.differences:
        screen.line(f"  function: {row.function_text.strip()}")
        screen.line(f"  PEFT:     {row.peft_text.strip()}")


def _shortened(prompt: str) -> str:
    return prompt if len(prompt) <= PROMPT_WIDTH else f"{prompt[: PROMPT_WIDTH - 3]}..."
