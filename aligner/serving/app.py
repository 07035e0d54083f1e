"""The HTTP side of a policy's server: OpenAI's interface on FastAPI and uvicorn.

event loop (a thread): token, bytes ─► threads: JSON, chat template, tokens ─► Waiting ─► engine
                  ▲                                                                (main thread)
                  └──────────────────── tokens as they are sampled ◄────────────────────┘

Every wait ends: a request's at `Service.timeout_s`, and `aligner.http.listening` has the others.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from aligner.data.tokenizers.tokenizer import encode_fragment
from aligner.environments.calls import Form
from aligner.errors import AlignerError, TokenizerError
from aligner.http.listening import MOST_CONNECTIONS, Bodies, check_bearer, listening
from aligner.serving.answers import Answer, ChatAnswer, Choice, CompletionAnswer, Wants
from aligner.serving.exchange import ENDING, Exchange, refusal
from aligner.serving.queue import Row, Waiting, sample_id
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


@dataclass
class Service:
    """Answers to requests; an `HTTPException` is the refusal of one.

    ``timeout_s``: a request waits so long for its answer, its last token included. ``token``: that
    every request must bring.
    """

    served: Served
    waiting: Waiting
    timeout_s: float
    token: str
    sessions: Sessions = field(default_factory=Sessions)
    _bodies: Bodies = field(default_factory=Bodies)
    # JSON takes many times its bytes: one request at a time.
    _parsing: threading.Lock = field(default_factory=threading.Lock)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _started: int = field(default_factory=lambda: int(time.time()))

    async def health(self) -> dict[str, str]:
        """Open to all, for it gives nothing away."""
        return {"status": "ok"}

    async def models(self, request: Request) -> dict[str, Any]:
        """The models that are served, which is one."""
        self._authorised(request)
        return {"object": "list", "data": [self._model()]}

    async def model(self, request: Request, name: str) -> dict[str, Any]:
        """The model of this name."""
        self._authorised(request)
        self._check_model(name)
        return self._model()

    async def tokenize(self, request: Request) -> dict[str, Any]:
        """Tokens of a text or a chat."""

        def ids(asked: TokenizeRequest) -> list[int]:
            if asked.messages is not None:
                kwargs = asked.chat_template_kwargs
                return self.served.encoded(self.served.chat(asked.messages, asked.tools, kwargs))
            if asked.prompt is None:
                raise HTTPException(400, "prompt: missing, and messages too; give one of them")
            return self.served.encoded(self.served.prompt(asked.prompt))

        async with self._read(request, TokenizeRequest) as asked:
            tokens = await run_in_threadpool(_checked, ids, asked)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self.served.positions}

    async def detokenize(self, request: Request) -> dict[str, Any]:
        """Text of tokens."""
        async with self._read(request, DetokenizeRequest) as asked:
            _checked(self.served.check_ids, asked.tokens)
            return {"prompt": self.served.tokenizer.decode(asked.tokens)}

    async def chat(self, request: Request) -> Response:
        """``/v1/chat/completions``."""

        def prompts(asked: ChatRequest) -> list[list[int]]:
            kwargs, keeps = asked.chat_template_kwargs, session is not None
            text = self.served.chat(asked.messages, asked.offered_tools, kwargs, keeps)
            return [self._tokens(text, session)]

        session = self._authorised(request)
        began = time.monotonic()
        async with self._read(request, ChatRequest) as asked:
            self._check_size(asked.n)
            ids = await run_in_threadpool(_checked, prompts, asked)
            form = self.served.form if asked.offered_tools else None
        return await self._answered(request, asked, ids, ChatAnswer, form, session, began)

    async def completions(self, request: Request) -> Response:
        """``/v1/completions``."""

        def prompts(asked: CompletionRequest) -> list[list[int]]:
            return [
                self._tokens(self.served.prompt(one) if isinstance(one, str) else one, session)
                for one in asked.prompts
            ]

        session = self._authorised(request)
        began = time.monotonic()
        async with self._read(request, CompletionRequest) as asked:
            self._check_size(asked.n * len(_checked(lambda: asked.prompts)))
            ids = await run_in_threadpool(_checked, prompts, asked)
        return await self._answered(request, asked, ids, CompletionAnswer, None, session, began)

    # Sessions ---------------------------------------------------------------------------------

    async def begin_session(self, request: Request) -> dict[str, Any]:
        """Begin a session, for whose key everything that is sampled is kept."""
        check_bearer(request, self.token)
        async with self._read(request, SessionRequest) as asked:
            session = self.sessions.begin(asked.seed)
        if session is None:
            raise HTTPException(429, "there are too many sessions; end some of them")
        return {"id": session.id, "api_key": session.key}

    async def session(self, request: Request, name: str) -> dict[str, Any]:
        """Record of a session; for the server's token, or the session's own."""
        return self._session_of(request, name).as_json()

    async def end_session(self, request: Request, name: str) -> dict[str, Any]:
        """End a session: its key is refused from now on; returns what it recorded."""
        check_bearer(request, self.token)
        session = self._session_of(request, name)
        self.sessions.end(session)
        return session.as_json()

    async def reward(self, request: Request) -> dict[str, Any]:
        """Set the reward of the session that asks."""
        session = self._authorised(request)
        if session is None:
            raise HTTPException(400, "a reward is a session's; ask with the session's key")
        async with self._read(request, RewardRequest) as asked:
            _checked(session.set_reward, asked.reward)
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

        def parse(body: bytearray) -> Kind:
            with self._parsing:
                return read_request(kind, body)

        async with self._bodies.read(request) as body:
            asked = await run_in_threadpool(_checked, parse, body)
            self._check_model(getattr(asked, "model", None))
            yield asked

    async def _answered(
        self,
        request: Request,
        asked: ChatRequest | CompletionRequest,
        prompts: Sequence[list[int]],
        kind: type[Answer],
        form: Form | None,
        session: Session | None,
        began: float,
    ) -> Response:
        """``began``: when the request was connected; what came before counts against its time."""
        asked = self.served.taken(asked)
        rows = _checked(self._rows, asked, prompts, session)
        tokenizer = self.served.tokenizer
        choices = [
            Choice(
                tokenizer,
                row.prompt,
                row.options.sampling.end_strings,
                holds=form is not None,
                min_tokens=row.options.length.min_length,
                skips_special=asked.skip_special_tokens,
            )
            for row in rows
        ]
        wants = Wants(
            self.served.name,
            asked.n,
            asked.wants_logprobs,
            asked.return_token_ids,
            asked.stream_options.include_usage,
            asked.stream_options.include_obfuscation,
            form,
        )
        answer = kind(tokenizer, wants, choices)

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

        exchange = Exchange(self.waiting, rows, answer, self.timeout_s, began, ended)
        if session is not None:
            session.follow(exchange.job)
        return await exchange.response(request, stream=asked.stream)

    def _check_size(self, answers: int) -> None:
        most = self.waiting.max_rows
        if answers > most:
            raise HTTPException(413, f"{answers} answers, at most {most} are taken in a request")

    def _tokens(self, prompt: str | list[int], session: Session | None) -> list[int]:
        """Tokens of a prompt that is text or tokens."""
        if not isinstance(prompt, str):
            return prompt
        prompt = self.served.shortened(prompt)  # to be refused by its length
        begin = self.served.encoded
        return (
            begin(prompt)
            if session is None
            else session.encoded(prompt, begin, partial(encode_fragment, self.served.tokenizer))
        )

    def _rows(
        self,
        asked: ChatRequest | CompletionRequest,
        prompts: Sequence[list[int]],
        session: Session | None,
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

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.served.name,
            "object": "model",
            "created": self._started,
            "owned_by": "aligner",
            "max_model_len": self.served.positions,
        }

    def _check_model(self, name: str | None) -> None:
        known = self.served.name
        if name is not None and not self.served.is_called(name):
            raise HTTPException(404, f"model: there is no {name[:80]!r}; {known!r} is served")


def _checked(function: Any, *arguments: Any) -> Any:
    """Result of a function of a request's contents; its errors are the sender's."""
    try:
        return function(*arguments)
    except HTTPException:
        raise
    except TokenizerError as error:
        advice = "a model without a chat template completes text: ask /v1/completions"
        raise HTTPException(400, f"{error}; {advice}") from error
    except AlignerError as error:
        raise HTTPException(400, str(error)) from error
    except Exception as error:  # of a tokenizer or a template that cannot take the text
        cause = f"{type(error).__name__}: {error}"
        raise HTTPException(400, f"the request cannot be encoded: {cause}") from error


def application(service: Service) -> FastAPI:
    """Routes of a service."""
    routes: dict[str, Any] = {
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
    known = ", ".join(name for name in routes if "{" not in name)

    async def refused(request: Request, error: Exception) -> Response:
        status, cause = 500, f"{type(error).__name__}: {error}"
        if isinstance(error, HTTPException):
            status, cause = error.status_code, error.detail
        if cause in ("Not Found", "Method Not Allowed"):
            cause += f": {request.method} {request.url.path[:80]!r}; there are {known}"
        return JSONResponse(refusal(status, cause), status)

    app = FastAPI(
        openapi_url=None,
        redirect_slashes=False,
        exception_handlers={HTTPException: refused, Exception: refused},
    )
    for name, function in routes.items():
        method, _, path = name.partition(" ")
        # Answers are written as they are: no model of them is made.
        app.add_api_route(path, function, methods=[method], response_model=None)
    return app


@contextlib.contextmanager
def policy_server(address: tuple[str, int], service: Service) -> Iterator[tuple[str, int]]:
    """Answer requests in a thread until the block ends; the host and port that it listens on.

    Raises:
        OSError: it cannot listen at ``address``.
    """
    connections = max(MOST_CONNECTIONS, service.waiting.max_rows)  # each waits on its own
    with listening(application(service), address, refusal, connections) as place:
        try:
            yield place
        finally:
            service.waiting.fail_all(ConnectionAbortedError(ENDING))
