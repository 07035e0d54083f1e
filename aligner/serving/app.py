"""The HTTP side of a policy's server: OpenAI's interface (`aligner.http` draws its threads).

Every wait ends: a request's at `Service.timeout_s`, and `aligner.http.listening` has the others.
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
from aligner.errors import AlignerError
from aligner.generation.rows import Progress, Row, RowJob, sample_id
from aligner.http.application import Bodies, Routes, blame_sender, check_bearer, http_server
from aligner.http.listening import MOST_CONNECTIONS
from aligner.http.queue import JobQueue
from aligner.http.results import Results
from aligner.serving.answers import Answer, ChatAnswer, Choice, CompletionAnswer
from aligner.serving.exchange import Exchange, refusal
from aligner.serving.openai_types import ModelInfo, ModelList, SessionKey, Tokens
from aligner.serving.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    RewardRequest,
    SessionRequest,
    TokenizeRequest,
    read_request,
)
from aligner.serving.served import Served
from aligner.serving.sessions import Session, Sessions

Kind = TypeVar("Kind", bound=BaseModel)
_Sampled = ChatRequest | CompletionRequest


@dataclass
class Service:
    """Answers to requests; an `HTTPException` is the refusal of one.

    ``timeout_s``: a request waits so long for its answer, its last token included. ``token``: that
    every request must bring.
    """

    served: Served
    queue: JobQueue[Row]
    timeout_s: float
    token: str
    sessions: Sessions = field(default_factory=Sessions)
    _bodies: Bodies = field(default_factory=Bodies)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _started: int = field(default_factory=lambda: int(time.time()))

    async def health(self) -> dict[str, str]:
        """Open to all, for it gives nothing away."""
        return {"status": "ok"}

    async def models(self, request: Request) -> ModelList:
        """The models that are served, which is one."""
        return ModelList(data=[await self.model(request, self.served.name)])

    async def model(self, request: Request, name: str) -> ModelInfo:
        """The model of this name."""
        self._authorised(request)
        self._check_model(name)
        name, positions = self.served.name, self.served.positions
        return ModelInfo(id=name, created=self._started, max_model_len=positions)

    async def tokenize(self, request: Request) -> Tokens:
        """Tokens of a text or a chat."""

        def ids(asked: TokenizeRequest) -> list[int]:
            if asked.messages is not None:
                kwargs = asked.chat_template_kwargs
                return self.served.encoded(self.served.chat(asked.messages, asked.tools, kwargs))
            if asked.prompt is None:
                raise HTTPException(400, "prompt: missing, and messages too; give one of them")
            return self.served.encoded(self.served.prompt(asked.prompt))

        async with self._read(request, TokenizeRequest) as asked:
            tokens = await run_in_threadpool(blame_sender, ids, asked)
        return Tokens(tokens=tokens, count=len(tokens), max_model_len=self.served.positions)

    async def detokenize(self, request: Request) -> dict[str, str]:
        """Text of tokens."""
        async with self._read(request, DetokenizeRequest) as asked:
            blame_sender(self.served.check_ids, asked.tokens)
            return {"prompt": self.served.tokenizer.decode(asked.tokens)}

    async def chat(self, request: Request) -> Response:
        """``/v1/chat/completions``."""
        return await self._completed(request, ChatRequest, ChatAnswer)

    async def completions(self, request: Request) -> Response:
        """``/v1/completions``."""
        return await self._completed(request, CompletionRequest, CompletionAnswer)

    # Sessions ---------------------------------------------------------------------------------

    async def begin_session(self, request: Request) -> SessionKey:
        """Begin a session, for whose key everything that is sampled is kept."""
        check_bearer(request, self.token)
        async with self._read(request, SessionRequest) as asked:
            session = self.sessions.begin(asked.seed)
        if session is None:
            raise HTTPException(429, "there are too many sessions; end some of them")
        return SessionKey(id=session.id, api_key=session.key)

    async def session(self, request: Request, name: str) -> dict[str, Any]:
        """Record of a session; for the server's token, or the session's own."""
        return self._session_of(request, name).as_json()

    async def end_session(self, request: Request, name: str) -> dict[str, Any]:
        """End a session: its key is refused from now on; returns what it recorded."""
        check_bearer(request, self.token)
        session = self._session_of(request, name)
        self.sessions.end(session)
        return session.as_json()

    async def reward(self, request: Request) -> dict[str, float | None]:
        """Set the reward of the session that asks."""
        session = self._authorised(request)
        if session is None:
            raise HTTPException(400, "a reward is a session's; ask with the session's key")
        async with self._read(request, RewardRequest) as asked:
            blame_sender(session.set_reward, asked.reward)
        return {"reward": session.reward}

    def _session_of(self, request: Request, name: str) -> Session:
        own = self._authorised(request)
        found = self.sessions.of_id(name)
        if found is None or own not in (None, found):
            raise HTTPException(404, f"session: there is no {name[:80]!r}")
        return found

    def _authorised(self, request: Request) -> Session | None:
        """The session whose key a request brings; None: it brings the server's token."""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self.sessions.of_key(key) if scheme == "Bearer" else None
        if session is None:
            if key.startswith("session-") and key != self.token:
                raise HTTPException(401, "the session has ended or expired; begin another one")
            check_bearer(request, self.token)
        return session

    # Steps of an answer -----------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _read(self, request: Request, kind: type[Kind]) -> AsyncIterator[Kind]:
        """The request in a body, which counts until the block ends."""
        self._authorised(request)
        async with self._bodies.read(request, partial(read_request, kind)) as asked:
            self._check_model(getattr(asked, "model", None))
            yield asked

    async def _completed(
        self, request: Request, kind: type[_Sampled], writer: type[Answer]
    ) -> Response:
        """Answer a request of ``kind``; the time to read and encode it counts against its time."""
        session = self._authorised(request)
        began = time.monotonic()
        async with self._read(request, kind) as asked:
            prompts = await run_in_threadpool(blame_sender, self._prompts, asked, session)
        has_tools = isinstance(asked, ChatRequest) and asked.offered_tools
        tokenizer, form = self.served.tokenizer, self.served.form if has_tools else None
        asked = self.served.taken(asked)
        rows = blame_sender(self._rows, asked, prompts, session)
        choices = []
        for row in rows:
            assert row.options is not None, "a request says how it is sampled"
            choice = Choice(
                tokenizer,
                row.prompt,
                row.options.sampling.end_strings,
                holds=form is not None,
                min_tokens=row.options.length.min_length,
                skips_special=asked.skip_special_tokens,
            )
            choices.append(choice)
        answer = writer(tokenizer, self.served.name, asked, choices, form)

        def ended(is_whole: bool) -> None:
            if session is None:
                return
            if not is_whole:
                session.withdraw([row.prompt for row in rows], [row.request for row in rows])
                return
            for row, choice in zip(rows, choices, strict=True):
                assert choice.finish is not None
                tokens = choice.prompt, choice.ids, choice.logprobs
                session.record(*tokens, choice.finish, choice.whole_text, row.request)

        results = Results[Progress]()
        job = RowJob(rows, results.put)
        if session is not None:
            session.follow(job)
        exchange = Exchange(job, results, answer, self.timeout_s, began, ended)
        return await exchange.response(self.queue, request, stream=asked.stream)

    def _prompts(self, asked: _Sampled, session: Session | None) -> list[list[int]]:
        """Tokens of each prompt of a request."""
        prompts = asked.prompts if isinstance(asked, CompletionRequest) else [asked]
        answers, most = asked.n * len(prompts), self.queue.max_items
        if answers > most:
            raise HTTPException(413, f"{answers} answers, at most {most} are taken in a request")
        return [self._tokens(prompt, session) for prompt in prompts]

    def _tokens(self, prompt: ChatRequest | str | list[int], session: Session | None) -> list[int]:
        """Tokens of a prompt that is a chat, text or tokens."""
        served = self.served
        if isinstance(prompt, ChatRequest):
            tools, kwargs = prompt.offered_tools, prompt.chat_template_kwargs
            prompt = served.chat(prompt.messages, tools, kwargs, session is not None)
        elif isinstance(prompt, str):
            prompt = served.prompt(prompt)
        if not isinstance(prompt, str):
            return prompt
        prompt = served.shortened(prompt)  # to be refused by its length
        if session is None:
            return served.encoded(prompt)
        go_on = partial(encode_fragment, served.tokenizer)
        return session.encoded(prompt, served.encoded, go_on)

    def _rows(
        self, asked: _Sampled, prompts: Sequence[list[int]], session: Session | None
    ) -> list[Row]:
        """``n`` rows for each prompt, adjacent.

        Raises:
            DataError: a prompt does not fit, the sampling is none, or the session is full.
        """
        names: tuple[object, ...] = ("request", next(self._numbers))
        requests: Sequence[int | None] = [None] * (len(prompts) * asked.n)
        if session is not None:
            longest = asked.longest or self.served.defaults.length.max_length
            requests = session.admit(prompts, longest, asked.n)
        try:
            options = [self.served.options(asked, ids) for ids in prompts]
        except AlignerError:
            if session is not None:
                session.withdraw([ids for ids in prompts for _ in range(asked.n)], requests)
            raise
        if session is not None:
            names = session.names(prompts) or names
        if asked.seed is not None:
            names = ("seed", asked.seed)
        return [
            Row(ids, sample_id(*names, sample), each, requests[prompt * asked.n + sample])
            for prompt, (ids, each) in enumerate(zip(prompts, options, strict=True))
            for sample in range(asked.n)
        ]

    def _check_model(self, name: str | None) -> None:
        known = self.served.name
        if name is not None and not self.served.is_called(name):
            raise HTTPException(404, f"model: there is no {name[:80]!r}; {known!r} is served")


def policy_server(
    address: tuple[str, int], service: Service
) -> AbstractContextManager[tuple[str, int]]:
    """Answer requests in a thread until the block ends; the host and port that it listens on.

    Raises:
        OSError: it cannot listen at ``address``.
    """
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
    most = max(MOST_CONNECTIONS, service.queue.max_items)  # each waits on its own connection
    return http_server(address, routes, service.queue, refusal=refusal, connections=most)
