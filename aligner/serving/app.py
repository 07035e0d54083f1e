"""The HTTP side of a policy's server: OpenAI's interface on FastAPI and uvicorn.

event loop (a thread): token, bytes ─► threads: JSON, chat template, tokens ─► Waiting ─► engine
                  ▲                                                                (main thread)
                  └──────────────────── tokens as they are sampled ◄────────────────────┘

Every wait ends: a request's at `Service.timeout_s`, and `aligner.http.listening` has the others.
"""

import asyncio
import contextlib
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Message as AsgiMessage
from starlette.types import Send

from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.environments.tools import Form
from aligner.errors import AlignerError, TokenizerError
from aligner.http.listening import ARRIVAL_S, Bodies, check_bearer, disconnected, listening
from aligner.serving.answers import Answer, ChatAnswer, Choice, CompletionAnswer, Wants
from aligner.serving.queue import Job, Progress, Waiting, sample_id
from aligner.serving.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    read_request,
)
from aligner.serving.served import Served

_ENDING = "the server is ending; try again later"
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
Kind = TypeVar("Kind", ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)


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
    _bodies: Bodies = field(default_factory=Bodies)
    # JSON takes many times its bytes: one request at a time.
    _parsing: threading.Lock = field(default_factory=threading.Lock)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _started: int = field(default_factory=lambda: int(time.time()))

    async def health(self) -> dict[str, str]:
        """Open to all, for it gives nothing away."""
        return {"status": "ok"}

    async def models(self, request: Request, name: str | None = None) -> dict[str, Any]:
        """The model that is served; ``name``: it alone."""
        check_bearer(request, self.token)
        self._check_model(name)
        model = {
            "id": self.served.name,
            "object": "model",
            "created": self._started,
            "owned_by": "aligner",
            "max_model_len": self.served.positions,
        }
        return {"object": "list", "data": [model]} if name is None else model

    async def tokenize(self, request: Request) -> dict[str, Any]:
        """Tokens of a text or a chat."""

        def ids(asked: TokenizeRequest) -> list[int]:
            if asked.messages is not None:
                return self.served.chat(asked.messages, asked.tools)
            if asked.prompt is None:
                raise HTTPException(400, "prompt: missing, and messages too; give one of them")
            return self.served.encoded(asked.prompt)

        async with self._read(request, TokenizeRequest) as asked:
            tokens = await run_in_threadpool(_checked, ids, asked)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self.served.positions}

    async def detokenize(self, request: Request) -> dict[str, Any]:
        """Text of tokens."""
        async with self._read(request, DetokenizeRequest) as asked:
            _check_ids(asked.tokens, self.served.tokenizer)
            return {"prompt": self.served.tokenizer.decode(asked.tokens)}

    async def chat(self, request: Request) -> Response:
        """``/v1/chat/completions``."""

        def prompt(asked: ChatRequest) -> list[list[int]]:
            return [self.served.chat(asked.messages, asked.offered_tools)]

        async with self._read(request, ChatRequest) as asked:
            prompts = await run_in_threadpool(_checked, prompt, asked)
            form = self.served.form if asked.offered_tools else None
        return await self._answered(request, asked, prompts, ChatAnswer, form)

    async def completions(self, request: Request) -> Response:
        """``/v1/completions``."""

        def encoded(asked: CompletionRequest) -> list[list[int]]:
            found = []
            for one in asked.prompts:
                if not isinstance(one, str):
                    _check_ids(one, self.served.tokenizer)
                found.append(self.served.encoded(one) if isinstance(one, str) else one)
            return found

        async with self._read(request, CompletionRequest) as asked:
            prompts = await run_in_threadpool(_checked, encoded, asked)
        return await self._answered(request, asked, prompts, CompletionAnswer, None)

    # Steps of an answer -----------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _read(self, request: Request, kind: type[Kind]) -> AsyncIterator[Kind]:
        """The request in a body, which counts until the block ends."""
        check_bearer(request, self.token)

        def parse(body: bytearray) -> Kind:
            with self._parsing:
                return read_request(kind, body)

        async with self._bodies.read(request) as body:
            asked = await run_in_threadpool(_checked, parse, body)
            self._check_model(asked.model)
            yield asked

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.served.name:
            raise HTTPException(404, f"model: there is no {name[:80]!r}; {self.served.name!r} is served")

    async def _answered(
        self,
        request: Request,
        asked: ChatRequest | CompletionRequest,
        prompts: Sequence[list[int]],
        kind: type[Answer],
        form: Form | None,
    ) -> Response:
        wants = Wants(
            self.served.name,
            asked.n,
            asked.wants_logprobs,
            asked.return_token_ids,
            asked.stream_options.include_usage,
            form,
        )
        options = [_checked(lambda ids: self.served.options(asked, len(ids)), ids) for ids in prompts]
        number = next(self._numbers)
        names = ("request", number) if asked.seed is None else ("seed", asked.seed)
        rows = [(place, sample) for place in range(len(prompts)) for sample in range(asked.n)]
        events: asyncio.Queue[Progress | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(event: Progress | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(events.put_nowait, event)

        job = Job(
            [prompts[place] for place, _ in rows],
            [sample_id(*names, sample) for _, sample in rows],
            [options[place] for place, _ in rows],
            tell,
        )
        choices = [
            Choice(
                self.served.tokenizer,
                prompts[place],
                options[place].sampling.end_strings,
                holds=form is not None,
            )
            for place, _ in rows
        ]
        answer = kind(self.served.tokenizer, wants, choices)
        if job.size > self.waiting.max_rows:
            most = self.waiting.max_rows
            raise HTTPException(413, f"{job.size} answers, at most {most} are taken in a request")
        if not self.waiting.add(job):
            raise HTTPException(429, "too many requests are waiting; try again later")
        if asked.stream:
            return _Events(self._pieces(job, events, answer), media_type="text/event-stream")
        watch = asyncio.create_task(disconnected(request))
        watch.add_done_callback(lambda _: events.put_nowait(HTTPException(499, "left")))
        try:
            async for progress in self._progress(job, events):
                choices[progress.row].push(progress)
        finally:
            watch.cancel()
        return JSONResponse(answer.whole())

    async def _progress(
        self, job: Job, events: "asyncio.Queue[Progress | Exception]"
    ) -> AsyncIterator[Progress]:
        """What the engine tells of a job, until all of its rows have ended."""
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        missing = job.size
        try:
            while missing:
                async with asyncio.timeout_at(deadline):
                    event = await events.get()
                if isinstance(event, Exception):
                    raise _as_refusal(event)
                missing -= event.end is not None
                yield event
        except TimeoutError as error:
            raise HTTPException(
                503, f"the answer was not complete within {self.timeout_s:g} s"
            ) from error
        except asyncio.CancelledError as error:
            raise HTTPException(503, _ENDING) from error
        finally:
            job.is_left = True

    async def _pieces(
        self, job: Job, events: "asyncio.Queue[Progress | Exception]", answer: Answer
    ) -> AsyncIterator[str]:
        """Server-sent events; an error is the last of them."""
        try:
            for piece in answer.first():
                yield _event(piece)
            async for progress in self._progress(job, events):
                for piece in answer.piece(progress):
                    yield _event(piece)
            for piece in answer.last():
                yield _event(piece)
            yield "data: [DONE]\n\n"
        except HTTPException as error:
            yield _event(refusal(error.status_code, error.detail))
        finally:
            job.is_left = True


class _Events(StreamingResponse):
    """A stream whose reader must keep reading."""

    async def stream_response(self, send: Send) -> None:
        """Send the pieces; one that is not taken in `ARRIVAL_S` ends the answer."""

        async def bounded(message: AsgiMessage) -> None:
            async with asyncio.timeout(ARRIVAL_S):
                await send(message)

        await super().stream_response(bounded)


def _event(piece: dict[str, Any]) -> str:
    return f"data: {json.dumps(piece)}\n\n"


def _checked(function: Any, *arguments: Any) -> Any:
    """Result of a function of a request's contents; its errors are the sender's."""
    try:
        return function(*arguments)
    except HTTPException:
        raise
    except TokenizerError as error:
        raise HTTPException(400, f"{error}; a model without a chat template completes text: ask /v1/completions") from error
    except AlignerError as error:
        raise HTTPException(400, str(error)) from error
    except Exception as error:  # of a tokenizer or a template that cannot take the text
        cause = f"{type(error).__name__}: {error}"
        raise HTTPException(400, f"the request cannot be encoded: {cause}") from error


def _check_ids(ids: Sequence[int], tokenizer: Tokenizer) -> None:
    if any(token >= tokenizer.vocab_size for token in ids):
        raise HTTPException(
            400, f"a token of {max(ids)} is outside the vocabulary of {tokenizer.vocab_size}"
        )


def _as_refusal(error: Exception) -> HTTPException:
    if isinstance(error, HTTPException):
        return error
    if isinstance(error, ConnectionAbortedError):
        return HTTPException(503, str(error))
    return HTTPException(500, f"the model failed: {type(error).__name__}: {error}")


def refusal(status: int, cause: str) -> dict[str, Any]:
    """Body of a refusal as OpenAI's interface has it; ``param``: the key that is at fault."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    key, colon, _ = cause.partition(":")
    names_key = bool(colon) and status == 400 and key.replace(".", "").replace("_", "").isalnum()
    code = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded"}.get(status)
    param = key if names_key else None
    return {"error": {"message": cause, "type": kind, "param": param, "code": code}}


def application(service: Service) -> FastAPI:
    """Routes of a service."""
    routes = {
        "GET /health": service.health,
        "GET /v1/models": service.models,
        "GET /v1/models/{name:path}": service.models,
        "POST /v1/chat/completions": service.chat,
        "POST /v1/completions": service.completions,
        "POST /tokenize": service.tokenize,
        "POST /detokenize": service.detokenize,
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
    with listening(application(service), address, refusal) as place:
        try:
            yield place
        finally:
            service.waiting.fail_all(ConnectionAbortedError(_ENDING))
