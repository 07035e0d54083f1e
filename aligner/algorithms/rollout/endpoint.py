"""Rollouts of agents: programs that ask the policy over HTTP, and say what that was worth.

An agent's process asks the HTTP server, a session records what it is answered, and its clock stops
as long as the engine owes it an answer.

The tokens of a trajectory depend on the run's seed, its sample id and what its agent asks only.
"""

import dataclasses
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

from aligner.algorithms.rollout.driver import ConversationFailedError, Episode, Steps
from aligner.algorithms.rollout.environments import ConversationRollouts
from aligner.architecture import GPTArchitecture
from aligner.config import SamplingOptions, SamplingRunConfig
from aligner.config.fields import MOST_SECONDS
from aligner.data.tokenizers.decoding import decode_response
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.environments.pool import Call, Failure
from aligner.environments.protocol import Turn, check_total
from aligner.environments.trajectory import Limits, Trajectory, TurnRecord
from aligner.errors import ConfigError, DataError
from aligner.generation.rows import sample_id
from aligner.http.tokens import new_token
from aligner.parallel.collectives import on_rank_zero
from aligner.serving.app import Service, policy_server
from aligner.serving.served import Request, Served
from aligner.serving.sessions import RecordedAnswer, Session

log = logging.getLogger(__name__)

_NAME = "policy"  # of the model
_HOST = "127.0.0.1"
# What a request may say of sampling; the run has said it.
_OF_THE_RUN = ("temperature", "top_p", "top_k", "repetition_penalty", "min_tokens", "seed")


@dataclass(frozen=True)
class PolicyServed(Served):
    """The policy of a run: it is sampled as the run says, whatever a request wants.

    ``max_tokens``, up to the run's length of a response, and ``stop`` are the request's.
    """

    _said: set[str] = field(default_factory=set)

    def accepts_name(self, name: str) -> bool:
        """Any name will do: agents have their own for the model."""
        del name
        return True

    def adapted(self, request: Request) -> Request:
        """The request without what the run says; what is left out is logged once."""
        own = {name for name in _OF_THE_RUN if getattr(request, name) is not None}
        if own - self._said:
            log.warning(
                "an agent's requests have %s; the run's own sampling is used",
                ", ".join(sorted(own)),
            )
            self._said.update(own)
        most = self.defaults.length.max_length
        changes: dict[str, Any] = dict.fromkeys(_OF_THE_RUN)
        changes["max_tokens"] = min(request.longest or most, most)
        if hasattr(request, "max_completion_tokens"):
            changes["max_completion_tokens"] = None
        return cast(Request, request.model_copy(update=changes))


class EndpointRollouts(ConversationRollouts):
    """Agents' trajectories in place of single responses.

    Made on all ranks. Rank 0 has the agents' processes and the server, on loopback with keys that
    are the agents' own, until ``closing`` closes.
    """

    gather_s = 0.02  # agents whose answers came together ask again at about the same time
    runs_agents = True

    def __init__(
        self,
        config: SamplingRunConfig,
        tokenizer: Tokenizer,
        architecture: GPTArchitecture,
        columns: Mapping[str, str | None],
        closing: ExitStack,
    ) -> None:
        """Start the server and the first agent's process.

        Raises:
            ConfigError: there is no such function or program, or it cannot be called with the
                data's ``columns``.
        """
        super().__init__(config, tokenizer, architecture, columns, closing)
        served = PolicyServed(
            _NAME,
            tokenizer,
            self._config.max_tokens,
            architecture.vocab_size,
            self._options,
            add_bos=config.data.add_bos,
            special_tokens_in_text=config.data.special_tokens_in_text,
        )
        self._service = Service(served, self._queue, MOST_SECONDS, new_token(None))
        self._base_url = ""

        def listen() -> None:
            try:
                address = closing.enter_context(policy_server((_HOST, 0), self._service))
            except OSError as error:
                raise ConfigError(
                    f"environment.kind=endpoint: cannot listen on {_HOST}: {error}"
                ) from error
            self._base_url = f"http://{address[0]}:{address[1]}/v1"

        on_rank_zero(listen)

    def conduct(self, episode: Episode, seed: int, options: SamplingOptions | None) -> Steps:
        """Run an agent once, with a session that records its requests.

        If the session has exceeded a limit, it does not matter how the agent ended, unless the
        engine failed.
        """
        defaults, sessions = options or self._options, self._service.sessions
        if self._service.served.defaults is not defaults:
            self._service.served = dataclasses.replace(self._service.served, defaults=defaults)
        names = ("rollout", seed, episode.sample_id, episode.attempt)
        limits = Limits(self._config.max_turns, self._config.max_tokens)
        episode.session = session = sessions.begin(sample_id(*names), limits)
        assert session is not None, "a server has room for a session of each slot"
        argument = (self._base_url, session.key, episode.seed, episode.columns)
        turn, failure = Turn(), None
        try:
            turn = yield Call(episode.slot, "run", argument, self._config.timeout_s)
        except ConversationFailedError as error:
            failure = error.failure
        finally:
            sessions.end(session)
        if failure is None or failure.reason != "engine_error":
            failure = self._rewarded(session, turn, failure)
        if not session.answers:
            return None, failure
        trajectory = trajectory_of(session, self._tokenizer, turn.info)
        trajectory.end_reason = session.exceeded or "done"
        return trajectory, failure

    def _rewarded(self, session: Session, turn: Turn, failure: Failure | None) -> Failure | None:
        """Take the reward that an agent returned; return why its trajectory is no sample."""
        assert self._pool is not None
        if not session.answers and (failure is None or session.exceeded is not None):
            text = f"{self._pool.name} ended without an answer of the policy"
            if session.exceeded is not None:
                limit = f"{session.exceeded}={getattr(self._config, session.exceeded)}"
                text += f": what it asked first does not fit environment.{limit}"
            if "output" in turn.info:
                text += f"; what it wrote ends: {turn.info['output']}"
            return Failure("env_error", text)
        if turn.reward is not None:
            session.set_reward(turn.reward)
        try:
            check_total(given.score for given in session.rewards.values())
        except DataError as error:
            return Failure("env_error", f"{self._pool.name}: {error}")
        return None if session.exceeded is not None else failure


def trajectory_of(session: Session, tokenizer: Tokenizer, info: Mapping[str, Any]) -> Trajectory:
    """Trajectory of a session: its sequences one after the other, as they were asked for.

    Turns are numbered in the order of their requests, not of answers or of places in the row. A
    reward is of the last requested answer that came since the reward before it, or else of the same
    as that; ``info`` goes with the last.
    """
    turn_of = {answer: turn for turn, answer in enumerate(sorted(session.answers), start=1)}
    answers_of: dict[int, list[RecordedAnswer]] = {}
    for answer in session.answers:
        answers_of.setdefault(answer.sequence, []).append(answer)
    trajectory, read, turns = Trajectory(tokenizer), dict[int, str](), dict[int, TurnRecord]()
    for answers in sorted(answers_of.values(), key=lambda answers: turn_of[answers[0]]):
        sequence = session.sequences[answers[0].sequence]
        trajectory.starts.append(len(trajectory.ids))
        for answer, end in zip(answers, sequence.ends, strict=True):
            turn, before = turn_of[answer], sequence.ids[: answer.begin]
            sampled = slice(answer.begin, answer.end)
            ids = sequence.ids[sampled]
            read[turn] = tokenizer.decode(before[answer.start :])
            content = decode_response(tokenizer, before, ids)
            turns[turn] = TurnRecord(content, len(ids), end == "stop")
            trajectory.append_context(before[answer.start :])
            trajectory.append(ids, sequence.logprobs[sampled], turn)
    trajectory.prompt, trajectory.turns = read[1], [turns[turn] for turn in sorted(turns)]
    for turn, record in enumerate(trajectory.turns[:-1], start=1):
        record.answer = [{"role": "agent", "content": read[turn + 1]}]
    begin = 0
    for count, given in session.rewards.items():
        rewarded = (turn_of[answer] for answer in session.answers[begin:count])
        record = trajectory.turns[max(rewarded, default=1) - 1]
        record.reward, record.parts = given.score, given.parts
        begin = count
    trajectory.turns[-1].info = dict(info)
    return trajectory
