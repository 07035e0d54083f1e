"""An HTTP server with OpenAI's API for a model, until Ctrl-C or SIGTERM.

clients ◄── HTTP ──► server thread ── rows ──► JobQueue ──► main thread, engine
                          ▲                                      │
                          └─────────────── tokens ───────────────┘
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from aligner.algorithms.ask.model import open_model
from aligner.algorithms.run.stopping import stop_signal
from aligner.config import ServeConfig
from aligner.config.commands.ask import as_run
from aligner.data.tokenizers.loading import with_template_kwargs
from aligner.errors import TokenizerError
from aligner.generation.batching import ServingEngine
from aligner.generation.rows import Row
from aligner.http.queue import JobQueue
from aligner.http.tokens import new_token, read_token
from aligner.models.policy.lm_policy import Policy
from aligner.parallel.collectives import on_rank_zero
from aligner.serving.app import Service, policy_server
from aligner.serving.served import Served
from aligner.serving.sessions import Sessions

Say = Callable[[str], None]


def serve(config: ServeConfig) -> None:
    """Serve a model until Ctrl-C or SIGTERM. Several processes first complete the current batch."""
    with ExitStack() as closing:
        engine = start_server(config, closing, lambda text: print(text, flush=True))
        with stop_signal(announce=False) as request:
            engine.serve(lambda: request.name is not None)


def start_server(config: ServeConfig, closing: ExitStack, say: Say) -> ServingEngine:
    """Load the model, start a server until ``closing`` closes, and return the engine to run."""
    # Limit the default length of answers to the positions of the model.
    model = open_model(config, closing)
    room = model.architecture.max_position_embeddings - 1
    if config.sampling.max_length > room:  # only the default of requests
        on_rank_zero(lambda: say(f"sampling.max_length={room} is used, the model's limit"))
        min_length = min(config.sampling.min_length, room)
        sampling = replace(config.sampling, max_length=room, min_length=min_length)
        config = replace(config, sampling=sampling, policy=model.run.policy)
        source = model.source
        model = replace(model, run=as_run(config, source.path, source.peft, source.tokenizer))
    # Load the weights, and only then accept requests.
    server, architecture = config.server, model.architecture
    path = Path(config.model.restore_from_path)
    if config.data.add_bos and model.tokenizer.bos_id is None:
        raise TokenizerError(
            "data.add_bos=true, but the tokenizer has no BOS token. Set it to false"
        )
    served = Served(
        server.model_name or (path.stem if path.suffix == ".nemo" else path.name) or "model",
        with_template_kwargs(model.tokenizer, config.data.chat_template_kwargs),
        architecture.max_position_embeddings,
        architecture.vocab_size,
        config.sampling.sampling_options,
        config.data.system_prompt,
        config.data.add_bos,
        config.data.special_tokens_in_text,
    )
    token = on_rank_zero(lambda: _token(config, say))
    generation, _ = model.start(served.positions - 1, say)
    generation.prepare_for_generation()
    closing.callback(generation.finish_generation)
    # Requests wait in the queue, from which the main thread takes them.
    queue, sessions = JobQueue[Row](server.max_waiting), Sessions(server.session_idle_s)
    service = Service(served, queue, server.timeout_s, token, sessions)

    def listen() -> None:
        setting = f"server.host={server.host} server.port={server.port}"
        address = closing.enter_context(policy_server((server.host, server.port), service, setting))
        say(f"{served.name} at http://{address[0]}:{address[1]}/v1 (Ctrl-C ends)")

    on_rank_zero(listen)
    # The policy reports tokens only in the run's own processes, and rank 0 reports only its rows.
    local = isinstance(generation, Policy) and config.cluster.engine == "local"
    world = model.engine.worlds[0]
    return ServingEngine(
        generation,
        queue,
        rows=model.rows,
        positions=architecture.max_position_embeddings,
        pad_id=model.tokenizer.pad_id,
        end_ids=frozenset(model.tokenizer.end_ids),
        seed=config.seed,
        listens=local and model.run.model.parallel.data_size(world) == 1,
        has_peers=not local or world > 1,
    )


def _token(config: ServeConfig, say: Say) -> str:
    """Return the API key: from a variable or a file, or a new key (written to the file, if any)."""
    server = config.server
    file = None if server.token_file is None else Path(server.token_file).expanduser()
    if server.token_env is None and (file is None or not file.exists()):
        token = new_token(server.token_file)
        if file is None:
            say(f"API key: {token}")
        return token
    token_or_none = read_token(server.token_env, server.token_file, "this server")
    assert token_or_none is not None, "the configuration names a variable or a file"
    return token_or_none
