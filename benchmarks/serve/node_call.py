"""The load generator's way straight to a node, past the gateway: what is left is what the gateway adds."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import aiohttp
import msgspec

from benchmarks.common.http_service import HttpService
from benchmarks.common.latency import Sample
from benchmarks.common.load import TIMEOUT, Planned, open_session, recorded
from cluster.frames import Frames
from cluster.messages import Done, Failed, GenerateRequest, Sampling, Token, decode_event
from cluster.text import BaseText


class NodeServer:
    """A Call of the base model. The prompt is tokenised before the time begins to count."""

    def __init__(self, session: aiohttp.ClientSession, url: str, base: str, model_dir: Path, max_tokens: int) -> None:
        """`base` is the base model's fingerprint."""
        self._session, self._url, self._base, self._max_tokens = session, f"{url}/generate", base, max_tokens
        self._text = BaseText(model_dir)

    async def __call__(self, request: Planned) -> Sample:
        message = GenerateRequest(
            id=uuid.uuid4().hex,
            base=self._base,
            tenant="bench",
            token_ids=self._text.encode_prompt(request.prompt)
            if isinstance(request.prompt, str)
            else [*request.prompt],
            max_tokens=self._max_tokens,
            sampling=Sampling(temperature=0.0),
            timeout=TIMEOUT,
            ignore_eos=True,
        )
        body = msgspec.msgpack.encode(message)
        sample = Sample(request.model, sent=time.perf_counter())
        async with recorded(sample), self._session.post(self._url, data=body) as reply:
            sample.error = str(reply.status) if reply.status != 200 else await _read(reply.content, sample)
        return sample


async def _read(stream: aiohttp.StreamReader, sample: Sample) -> str:
    """The error, or nothing."""
    frames = Frames()
    async for chunk in stream.iter_any():
        now = time.perf_counter()
        for body in frames.feed(chunk):
            match decode_event(body):
                case Token():
                    sample.times.append(now)
                case Done(prompt_tokens=prompt, completion_tokens=output):
                    sample.prompt_tokens, sample.output_tokens = prompt, output
                    return ""
                case Failed(type=kind):
                    return f"in stream: {kind}"
    return "cut off"


async def find_node(service: HttpService) -> tuple[str, str]:
    """Returns URL and base fingerprint of the service's only node, as its gateway reports them to an operator."""
    async with (
        open_session(service.admin_key) as operator,
        operator.get(f"{service.url}/nodes", raise_for_status=True) as reply,
    ):
        (node,) = (await reply.json())["nodes"]
    return node["record"]["url"], node["record"]["base"]
