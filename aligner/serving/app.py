"""Endpoints of a policy's server with OpenAI's interface (`aligner.http` describes the threads).

`Service.timeout_s` limits the time of a request, `aligner.http.listening` that of a connection.
"""

import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from aligner.data.tokenizers.tokenizer import encode_fragment
from aligner.device.counter_hash import text_hash
from aligner.errors import AlignerError
from aligner.generation.rows import Progress, Row, RowJob
from aligner.http.application import Bodies, Routes, blame_sender, check_bearer, http_server
from aligner.http.listening import MAX_CONNECTIONS
from aligner.http.queue import JobQueue
from aligner.http.results import Results
from aligner.serving import requests
from aligner.serving.answers import Answer, ChatAnswer, Choice, CompletionAnswer
from aligner.serving.exchange import Exchange, refusal
from aligner.serving.served import Served
from aligner.serving.sessions import Session, Sessions

Kind = TypeVar("Kind", bound=BaseModel)
_Sampled = requests.ChatRequest | requests.CompletionRequest


@dataclass
class Service:
    """Endpoints of the server. An endpoint refuses a request by raising `HTTPException`."""

    served: Served
    queue: JobQueue[Row]
    timeout_s: float  # time limit of a request, up to the last token of its answer
    token: str  # bearer token of requests without the key of a session
    sessions: Sessions = field(default_factory=Sessions)
    _bodies: Bodies = field(default_factory=Bodies)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _started: int = field(default_factory=lambda: int(time.time()))

    async def health(self) -> dict[str, str]:
        """Return the server's state. The request needs no token."""
        return {"status": "ok"}

    async def models(self, request: Request) -> dict[str, Any]:
        """Return the list of models, with one entry."""
        return {"object": "list", "data": [await self.model(request, self.served.name)]}

    async def model(self, request: Request, name: str) -> dict[str, Any]:
        """Describe the model ``name``."""
        self._authorised(request)
        self._check_model(name)
        model = {"id": self.served.name, "object": "model", "created": self._started}
        return {**model, "owned_by": "aligner", "max_model_len": self.served.positions}

    async def tokenize(self, request: Request) -> dict[str, Any]:
        """Return the tokens of a text or a chat."""

        def encode(body: requests.TokenizeRequest) -> list[int]:
            served, text = self.served, body.text_prompt
            if text is not None:
                return served.encoded(served.prompt(text))
            tools, kwargs = body.tools, body.chat_template_kwargs
            return served.encoded(served.chat(body.messages or [], tools, kwargs))

        async with self._read(request, requests.TokenizeRequest) as body:
            tokens = await run_in_threadpool(blame_sender, encode, body)
        positions = self.served.positions
        return {"tokens": tokens, "count": len(tokens), "max_model_len": positions}

    async def detokenize(self, request: Request) -> dict[str, str]:
        """Return the text of tokens."""
        async with self._read(request, requests.DetokenizeRequest) as body:
            blame_sender(self.served.check_ids, body.tokens)
            return {"prompt": self.served.tokenizer.decode(body.tokens)}

    async def chat(self, request: Request) -> Response:
        """Answer ``/v1/chat/completions``."""
        return await self._sample(request, requests.ChatRequest, ChatAnswer)

    async def completions(self, request: Request) -> Response:
        """Answer ``/v1/completions``."""
        return await self._sample(request, requests.CompletionRequest, CompletionAnswer)

    async def begin_session(self, request: Request) -> dict[str, str]:
        """Begin a session. Return its id and key. Answers to requests with the key are recorded."""
        check_bearer(request, self.token)
        async with self._read(request, requests.SessionRequest) as body:
            session = self.sessions.begin(body.seed)
        if session is None:
            raise HTTPException(429, "there are too many sessions. End some of them")
        return {"id": session.id, "api_key": session.key}

    async def session(self, request: Request, name: str) -> dict[str, Any]:
        """Return a session's record. Authorised by the server's token or the session's key."""
        return self._session_with_id(request, name).as_json()

    async def end_session(self, request: Request, name: str) -> dict[str, Any]:
        """End a session and return its record. Later requests with its key are refused."""
        check_bearer(request, self.token)
        session = self._session_with_id(request, name)
        self.sessions.end(session)
        return session.as_json()

    async def reward(self, request: Request) -> dict[str, float | None]:
        """Set the reward of the session to which the request's key belongs."""
        session = self._authorised(request)
        if session is None:
            raise HTTPException(400, "a reward belongs to a session. Send the session's key")
        async with self._read(request, requests.RewardRequest) as body:
            blame_sender(session.set_reward, body.reward)
        return {"reward": session.reward}

    def _session_with_id(self, request: Request, session_id: str) -> Session:
        key_session = self._authorised(request)
        session = self.sessions.with_id(session_id)
        # A session's key only gives access to its own session.
        if session is None or key_session not in (None, session):
            raise HTTPException(404, f"session: {session_id[:80]!r} does not exist or has ended")
        return session

    def _authorised(self, request: Request) -> Session | None:
        """Return the session of the request's key, or None for the server's token."""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self.sessions.with_key(key) if scheme == "Bearer" else None
        if session is None:
            if key.startswith("session-") and key != self.token:
                raise HTTPException(401, "the session has ended or expired. Begin another session")
            check_bearer(request, self.token)
        return session

    @contextlib.asynccontextmanager
    async def _read(self, request: Request, kind: type[Kind]) -> AsyncIterator[Kind]:
        """Async context manager: check key and model of a request, and yield its parsed body."""
        self._authorised(request)
        async with self._bodies.read(request, partial(requests.read_request, kind)) as body:
            self._check_model(getattr(body, "model", None))
            yield body

    async def _sample(
        self, request: Request, kind: type[_Sampled], writer: type[Answer]
    ) -> Response:
        """Sample answers to a request. The time limit includes reading and encoding the request.

        ``kind``: class of the request's body. ``writer``: class that formats the answers.
        """
        session = self._authorised(request)
        began = time.monotonic()
        # Read and encode the request.
        async with self._read(request, kind) as body:
            prompts = await run_in_threadpool(blame_sender, self._prompts, body, session)
        # Each answer has a row, from which the engine samples, and a choice, which formats it.
        has_tools = isinstance(body, requests.ChatRequest) and body.offered_tools
        form = self.served.form if has_tools else None
        body = self.served.adapted(body)
        rows = blame_sender(self._rows, body, prompts, session)
        options = {"is_buffered": form is not None, "skips_special": body.skip_special_tokens}
        choices = [Choice(self.served.tokenizer, row, **options) for row in rows]

        def update_session(is_complete: bool) -> None:
            if session is not None and not is_complete:
                session.withdraw(prompts, [row.request for row in rows])
            elif session is not None:
                for choice, row in zip(choices, rows, strict=True):
                    assert choice.finish is not None
                    assert row.request is not None
                    tokens = choice.prompt, choice.ids, choice.logprobs
                    session.record(*tokens, choice.finish, choice.full_text, row.request)

        # Add the rows to the queue, and send the answer.
        results = Results[Progress]()
        job = RowJob(rows, results.put)
        if session is not None:
            session.track(job)
        answer = writer(self.served.tokenizer, self.served.name, body, choices, form)
        exchange = Exchange(job, results, answer, self.timeout_s, began, update_session)
        return await exchange.response(self.queue, request, stream=body.stream)

    def _prompts(self, body: _Sampled, session: Session | None) -> list[list[int]]:
        prompts = body.prompts if isinstance(body, requests.CompletionRequest) else [body]
        answers, limit = body.n * len(prompts), self.queue.max_items
        if answers > limit:
            raise HTTPException(413, f"{answers} answers, but the limit of a request is {limit}")
        return [self._tokens(prompt, session) for prompt in prompts]

    def _tokens(
        self, prompt: requests.ChatRequest | str | list[int], session: Session | None
    ) -> list[int]:
        served = self.served
        if isinstance(prompt, requests.ChatRequest):
            tools, kwargs = prompt.offered_tools, prompt.chat_template_kwargs
            prompt = served.chat(prompt.messages, tools, kwargs, session is not None)
        elif isinstance(prompt, str):
            prompt = served.prompt(prompt)
        if not isinstance(prompt, str):
            return prompt
        prompt = served.shortened(prompt)  # what is left is still refused as too long
        if session is None:
            return served.encoded(prompt)
        return session.encode(prompt, served.encoded, partial(encode_fragment, served.tokenizer))

    def _rows(
        self, body: _Sampled, prompts: Sequence[list[int]], session: Session | None
    ) -> list[Row]:
        """Return ``n`` adjacent rows for each prompt, and reserve their answers in the session."""
        seed_parts: tuple[object, ...] = ("request", next(self._numbers))
        # Reserve the answers in the session, and release them if the request is refused.
        admitted: Sequence[int | None] = [None] * (len(prompts) * body.n)
        if session is not None:
            longest = body.longest or self.served.defaults.length.max_length
            admitted = session.admit(prompts, longest, body.n)
        try:
            options = [self.served.options(body, ids) for ids in prompts]
        except AlignerError:
            if session is not None:
                session.withdraw(prompts, admitted)
            raise
        # The seed of the request overrides the seed of the session.
        if session is not None:
            seed_parts = session.seed_parts(prompts) or seed_parts
        if body.seed is not None:
            seed_parts = ("seed", body.seed)
        return [
            Row(ids, text_hash(*seed_parts, sample), row_options, admitted[index * body.n + sample])
            for index, (ids, row_options) in enumerate(zip(prompts, options, strict=True))
            for sample in range(body.n)
        ]

    def _check_model(self, name: str | None) -> None:
        if name is not None and not self.served.accepts_name(name):
            served = self.served.name
            raise HTTPException(404, f"model: {name[:80]!r} is not served, only {served!r}")


def policy_server(
    address: tuple[str, int], service: Service, setting: str
) -> AbstractContextManager[tuple[str, int]]:
    """Return `http_server` for ``service``. ``address`` and ``setting`` are its arguments."""
    routes: Routes = {
        "GET /health": service.health,
        "GET /v1/models": service.models,
        "GET /v1/models/{name:path}": service.model,
        "POST /v1/chat/completions": service.chat,
        "POST /v1/completions": service.completions,
        "POST /tokenize": service.tokenize,
        "POST /detokenize": service.detokenize,
        "POST /v1/sessions": service.begin_session,
        "GET /v1/sessions/{name}": service.session,
        "DELETE /v1/sessions/{name}": service.end_session,
        "POST /v1/reward": service.reward,
    }
    connections = max(MAX_CONNECTIONS, service.queue.max_items)  # one per waiting request
    return http_server(
        address, routes, service.queue, setting=setting, refusal=refusal, connections=connections
    )
