"""A model behind OpenAI's HTTP interface, until Ctrl-C or SIGTERM."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from aligner.algorithms.ask.model import AskedModel, open_asked_model
from aligner.algorithms.run.stopping import stop_signal
from aligner.config import ServeConfig
from aligner.config.commands.ask import as_run
from aligner.data.tokenizers.loading import with_template_kwargs
from aligner.errors import ConfigError, TokenizerError
from aligner.generation.batching import EngineSettings, ServingEngine
from aligner.generation.rows import Row
from aligner.http.queue import JobQueue
from aligner.http.tokens import new_token, read_token
from aligner.models.interfaces import GenerationInterface
from aligner.models.policy.lm_policy import Policy
from aligner.parallel.collectives import on_rank_zero
from aligner.serving.app import Service, policy_server
from aligner.serving.served import Served
from aligner.serving.sessions import Sessions

Say = Callable[[str], None]


def serve(config: ServeConfig) -> None:
    """Serve a model; the address is printed once requests are taken.

    The first signal ends what is being generated and then the server; a second one has its default
    effect. With several processes what is being generated is finished first.
    """
    with ExitStack() as closing:
        engine = start_server(config, closing, lambda text: print(text, flush=True))
        with stop_signal(speaks=False) as request:
            engine.serve(lambda: request.name is not None)


def start_server(config: ServeConfig, closing: ExitStack, say: Say) -> ServingEngine:
    """Load the model and take requests, until ``closing`` closes; the engine answers them.

    Args:
        config: the command's options.
        closing: ends the server, and then the model.
        say: on rank 0 called with lines for the user: the address, and a token that was made.

    Raises:
        ConfigError: it cannot listen there, or there is no token where it should be.
    """
    asked = open_asked_model(config, closing)
    room = asked.architecture.max_position_embeddings - 1
    if config.sampling.max_length > room:  # the default of requests; each says its own
        on_rank_zero(lambda: say(f"sampling.max_length={room}: more does not fit the model"))
        least = min(config.sampling.min_length, room)
        sampling = replace(config.sampling, max_length=room, min_length=least)
        config = replace(config, sampling=sampling, policy=asked.run.policy)
        source = asked.source
        asked = replace(asked, run=as_run(config, source.path, source.peft, source.tokenizer))
    served = _served(config, asked)
    token = on_rank_zero(lambda: _token(config, say))
    generation, _ = asked.start(served.positions - 1, say)
    generation.prepare_for_generation()
    closing.callback(generation.finish_generation)
    waiting = JobQueue[Row](config.server.max_waiting)
    sessions = Sessions(config.server.session_idle_s)
    service = Service(served, waiting, config.server.timeout_s, token, sessions)

    def listen() -> None:
        host, port = _listening(config, service, closing)
        say(f"{served.name} at http://{host}:{port}/v1 (Ctrl-C ends)")

    on_rank_zero(listen)
    return ServingEngine(generation, waiting, _settings(config, asked, generation))


def _served(config: ServeConfig, asked: AskedModel) -> Served:
    path = Path(config.model.restore_from_path)
    if config.data.add_bos and asked.tokenizer.bos_id is None:
        raise TokenizerError("data: add_bos=true but the tokenizer has no BOS token")
    return Served(
        config.server.model_name or (path.stem if path.suffix == ".nemo" else path.name) or "model",
        with_template_kwargs(asked.tokenizer, config.data.chat_template_kwargs),
        asked.architecture.max_position_embeddings,
        asked.architecture.vocab_size,
        config.sampling.sampling_options,
        config.data.system_prompt,
        config.data.add_bos,
        config.data.special_tokens_in_text,
    )


def _settings(
    config: ServeConfig, asked: AskedModel, generation: GenerationInterface
) -> EngineSettings:
    local = isinstance(generation, Policy) and config.cluster.engine == "local"
    world = asked.engine.worlds[0]
    return EngineSettings(
        rows=asked.rows,
        positions=asked.architecture.max_position_embeddings,
        pad_id=asked.tokenizer.pad_id,
        end_ids=frozenset(asked.tokenizer.end_ids),
        seed=config.seed,
        # Rank 0 hears of its own share of the rows only.
        listens=local and asked.run.model.parallel.data_size(world) == 1,
        has_peers=not local or world > 1,
    )


def _token(config: ServeConfig, say: Say) -> str:
    server = config.server
    file = None if server.token_file is None else Path(server.token_file).expanduser()
    if server.token_env is None and (file is None or not file.exists()):
        token = new_token(server.token_file)
        if file is None:
            say(f"API key: {token}")
        return token
    found = read_token(server.token_env, server.token_file, "this server")
    assert found is not None, "one of them is named"
    return found


def _listening(config: ServeConfig, service: Service, closing: ExitStack) -> tuple[str, int]:
    server = config.server
    try:
        return closing.enter_context(policy_server((server.host, server.port), service))
    except OSError as error:
        raise ConfigError(
            f"server.host={server.host} server.port={server.port}: cannot listen there: {error}; "
            "give another port, or 0 for any"
        ) from error
