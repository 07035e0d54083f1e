"""Endpoints of a reward server. Samples of several requests are scored in one batch.

A large request is scored in slices, alternating with other requests (`aligner.http`).
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from aligner.http import JSON_TYPE
from aligner.http.application import Bodies, Routes, blame_sender, check_bearer, http_server
from aligner.http.messages import parse_json, validated
from aligner.http.queue import Job, JobQueue
from aligner.http.results import Results
from aligner.rewards.server.wire import HEALTH, SCORE, HealthAnswer, ScoreRequest, WireSample

Ids = list[int]


@dataclass
class RewardService:
    """Endpoints of the server. Each raises an `HTTPException` to refuse a request.

    ``encode``: returns the tokens of a sample. An `AlignerError` refuses the request.
    ``timeout_s``: time limit of a request. ``token``: the bearer token, None to admit all requests.
    """

    attributes: Sequence[str]
    encode: Callable[[WireSample], Ids]
    queue: JobQueue[Ids]
    timeout_s: float
    token: str | None = None
    _bodies: Bodies = field(default_factory=Bodies)

    async def health(self) -> HealthAnswer:
        """Return the model's attributes. No token is needed, as they disclose nothing."""
        return HealthAnswer(status="ok", attributes=list(self.attributes))

    async def score(self, request: Request) -> Response:
        """Return the rewards of the samples."""
        check_bearer(request, self.token)
        async with self._bodies.read(
            request, lambda body: validated(ScoreRequest, parse_json(body))
        ) as body:
            sequences = await run_in_threadpool(blame_sender, self._sequences, body.samples)
            rewards = await self._rewards(request, sequences) if sequences else []
        plain = [row[0] if len(row) == 1 else row for row in rewards]
        # Not JSONResponse, which refuses NaN. The client reports NaN to its user.
        return Response(json.dumps({"rewards": plain}), media_type=JSON_TYPE)

    def serving(self, host: str, port: int) -> AbstractContextManager[tuple[str, int]]:
        """Answer requests until the block ends. See `aligner.http.application.http_server`."""
        routes: Routes = {f"GET {HEALTH}": self.health, f"POST {SCORE}": self.score}
        setting = f"--host {host} --port {port}"
        return http_server((host, port), routes, self.queue, setting=setting)

    def _sequences(self, samples: Sequence[WireSample]) -> list[Ids]:
        """Return the tokens of all samples."""
        limit = self.queue.max_items
        if len(samples) > limit:
            cause = f"{len(samples)} samples, at most {limit} are taken in a request"
            raise HTTPException(413, cause)
        return [self.encode(sample) for sample in samples]

    async def _rewards(self, request: Request, sequences: list[Ids]) -> list[list[float]]:
        """Have the model score the sequences, unless the client disconnects."""
        results = Results[list[float]]()
        job = Job(sequences, results.put)
        if not self.queue.add(job):
            raise HTTPException(503, "too many samples are waiting, try again later")
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        timeout_message = f"the model did not answer within {self.timeout_s:g} s"
        with results.while_connected(request):
            return [rewards async for rewards in results.of(job, deadline, timeout_message)]
