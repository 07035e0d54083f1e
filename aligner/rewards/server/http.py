"""The HTTP side of a reward server: samples of many requests are scored in one batch.

A large request is scored in slices between the others' (`aligner.http`).
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
    """Answers to requests; an `HTTPException` is the refusal of one.

    ``encode``: a sample's tokens, or an `AlignerError` for its sender. ``timeout_s``: a
    request waits so long for the model. ``token``: None admits all requests.
    """

    attributes: Sequence[str]
    encode: Callable[[WireSample], Ids]
    queue: JobQueue[Ids]
    timeout_s: float
    token: str | None = None
    _bodies: Bodies = field(default_factory=Bodies)

    async def health(self) -> HealthAnswer:
        """Names of what the model rates; without a token, as they disclose nothing."""
        return HealthAnswer(status="ok", attributes=list(self.attributes))

    async def score(self, request: Request) -> Response:
        """Rewards of the samples."""
        check_bearer(request, self.token)
        async with self._bodies.read(
            request, lambda body: validated(ScoreRequest, parse_json(body))
        ) as asked:
            sequences = await run_in_threadpool(blame_sender, self._sequences, asked.samples)
            rewards = await self._rewards(request, sequences) if sequences else []
        plain = [row[0] if len(row) == 1 else row for row in rewards]
        # Not JSONResponse, which takes no NaN: the client tells its user of one.
        return Response(json.dumps({"rewards": plain}), media_type=JSON_TYPE)

    def serving(self, address: tuple[str, int]) -> AbstractContextManager[tuple[str, int]]:
        """Answer requests until the block ends; see `aligner.http.application.http_server`."""
        routes: Routes = {f"GET {HEALTH}": self.health, f"POST {SCORE}": self.score}
        return http_server(address, routes, self.queue)

    def _sequences(self, samples: Sequence[WireSample]) -> list[Ids]:
        """The tokens of all samples."""
        most = self.queue.max_items
        if len(samples) > most:
            cause = f"{len(samples)} samples, at most {most} are taken in a request"
            raise HTTPException(413, cause)
        return [self.encode(sample) for sample in samples]

    async def _rewards(self, request: Request, sequences: list[Ids]) -> list[list[float]]:
        """Rewards of the model; if the sender leaves, nobody waits for them any more."""
        results = Results[list[float]]()
        job = Job(sequences, results.put)
        if not self.queue.add(job):
            raise HTTPException(503, "too many samples are waiting, try again later")
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        timeout_message = f"the model did not get to it within {self.timeout_s:g} s"
        with results.while_connected(request):
            return [rewards async for rewards in results.of(job, deadline, timeout_message)]
