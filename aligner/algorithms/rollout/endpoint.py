"""Rollouts of agents: programs that send requests to the policy over HTTP and return a reward.

    agent process ◄── HTTP ──► server thread ── rows ──► JobQueue ──► main thread, engine
     ▲   │                          ▲                                       │
    call reward                     └──────────────── tokens ───────────────┘
     │   ▼
    driver thread

The tokens of a trajectory depend only on the run's seed, the sample id and the agent's requests.
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
from aligner.config import SamplingOptions
from aligner.config.fields import MOST_SECONDS
from aligner.data.tokenizers.decoding import decode_response
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.device.counter_hash import text_hash
from aligner.environments.pool import Call, Failure
from aligner.environments.protocol import Turn, check_total
from aligner.environments.trajectory import Limits, Trajectory, TurnRecord
from aligner.errors import DataError
from aligner.http.tokens import new_token
from aligner.parallel.collectives import on_rank_zero
from aligner.serving.app import Service, policy_server
from aligner.serving.served import Request, Served
from aligner.serving.sessions import RecordedAnswer, Session

log = logging.getLogger(__name__)

_MODEL_NAME = "policy"
_HOST = "127.0.0.1"
# Sampling fields of a request that the run's configuration overrides.
_RUN_FIELDS = ("temperature", "top_p", "top_k", "repetition_penalty", "min_tokens", "seed")


@dataclass(frozen=True)
class PolicyServed(Served):
    """The policy of a run. Requests may only set ``stop``, and ``max_tokens`` up to a limit."""

    _logged_fields: set[str] = field(default_factory=set)

    def accepts_name(self, name: str) -> bool:
        """Return True: agents may request any model name."""
        del name
        return True

    def adapted(self, request: Request) -> Request:
        """Return ``request`` with the run's sampling settings. Log each replaced field once."""
        dropped = {name for name in _RUN_FIELDS if getattr(request, name) is not None}
        if dropped - self._logged_fields:
            log.warning(
                "an agent's requests set %s. The sampling settings of the run are used instead",
                ", ".join(sorted(dropped)),
            )
            self._logged_fields.update(dropped)
        max_length = self.defaults.length.max_length
        changes: dict[str, Any] = dict.fromkeys(_RUN_FIELDS)
        changes["max_tokens"] = min(request.longest or max_length, max_length)
        if hasattr(request, "max_completion_tokens"):
            changes["max_completion_tokens"] = None
        return cast(Request, request.model_copy(update=changes))


class EndpointRollouts(ConversationRollouts):
    """Rollouts of agents, which use an HTTP server on 127.0.0.1 with one key per session."""

    gather_s = 0.02  # seconds. Agents that got answers together send the next requests together
    runs_agents = True

    def _prepare(self, architecture: GPTArchitecture, closing: ExitStack) -> None:
        data = self._run_config.data
        served = PolicyServed(
            _MODEL_NAME,
            self._tokenizer,
            self._config.max_tokens,
            architecture.vocab_size,
            self._options,
            add_bos=data.add_bos,
            special_tokens_in_text=data.special_tokens_in_text,
        )
        # The driver's time limits apply, so requests have none.
        self._service = Service(served, self._queue, MOST_SECONDS, new_token(None))
        self._base_url = ""

        def listen() -> None:
            setting = f"environment.kind=endpoint on {_HOST}"
            host, port = closing.enter_context(policy_server((_HOST, 0), self._service, setting))
            self._base_url = f"http://{host}:{port}/v1"

        on_rank_zero(listen)

    def conduct(self, episode: Episode, seed: int, options: SamplingOptions | None) -> Steps:
        """Run an agent once, with a session that records the agent's requests (see `Steps`)."""
        # Validation may sample with other options than training.
        defaults, sessions = options or self._options, self._service.sessions
        if self._service.served.defaults is not defaults:
            self._service.served = dataclasses.replace(self._service.served, defaults=defaults)
        session_id = text_hash("rollout", seed, episode.sample_id, episode.attempt)
        limits = Limits(self._config.max_turns, self._config.max_tokens)
        episode.session = session = sessions.begin(session_id, limits)
        assert session is not None, "the server must have room for one session of each slot"
        argument = (self._base_url, session.key, episode.seed, episode.columns)
        turn, failure = Turn(), None
        try:
            turn = yield Call(episode.slot, "run", argument, self._config.timeout_s)
        except ConversationFailedError as error:
            failure = error.failure
        finally:
            sessions.end(session)
        # After an engine error the conversation is repeated, so a reward is not needed.
        if failure is None or failure.reason != "engine_error":
            failure = self._rewarded(session, turn, failure)
        if not session.answers:
            return None, failure
        trajectory = trajectory_of(session, self._tokenizer, turn.info)
        trajectory.end_reason = session.exceeded or "done"
        return trajectory, failure

    def _rewarded(self, session: Session, turn: Turn, failure: Failure | None) -> Failure | None:
        """Record the agent's reward. Return the failure of the trajectory, or None without any."""
        assert self._pool is not None
        if not session.answers and (failure is None or session.exceeded is not None):
            text = f"{self._pool.name} ended before the policy had answered a request"
            if session.exceeded is not None:
                limit = f"{session.exceeded}={getattr(self._config, session.exceeded)}"
                text += f": the first request does not fit environment.{limit}"
            if "output" in turn.info:
                text += f". The agent's last output: {turn.info['output']}"
            return Failure("env_error", text)
        if turn.reward is not None:
            session.set_reward(turn.reward)
        try:
            check_total(reward.score for reward in session.rewards.values())
        except DataError as error:
            return Failure("env_error", f"{self._pool.name}: {error}")
        return None if session.exceeded is not None else failure


def trajectory_of(session: Session, tokenizer: Tokenizer, info: Mapping[str, Any]) -> Trajectory:
    """Convert an agent's session to a trajectory.

    Sequences are sorted by their first requests. A turn is an answer of the policy. Turns are
    numbered in the order of requests. A reward is assigned to the latest turn among the answers
    since the previous reward, or to turn 1 without such answers. ``info``: stored in the last turn.
    """
    # Number the turns, and group the answers by sequence.
    turn_of = {answer: turn for turn, answer in enumerate(sorted(session.answers), start=1)}
    answers_of: dict[int, list[RecordedAnswer]] = {}
    for answer in session.answers:
        answers_of.setdefault(answer.sequence, []).append(answer)
    trajectory, prompt_texts, turns = Trajectory(tokenizer), dict[int, str](), {}
    # Append the sequences. In each, prompt tokens and sampled tokens alternate.
    for answers in sorted(answers_of.values(), key=lambda answers: turn_of[answers[0]]):
        sequence = session.sequences[answers[0].sequence]
        trajectory.starts.append(len(trajectory.ids))
        for answer, end in zip(answers, sequence.ends, strict=True):
            turn, prompt_ids = turn_of[answer], sequence.ids[: answer.begin]
            sampled = slice(answer.begin, answer.end)
            ids = sequence.ids[sampled]
            prompt_texts[turn] = tokenizer.decode(prompt_ids[answer.start :])
            content = decode_response(tokenizer, prompt_ids, ids)
            turns[turn] = TurnRecord(content, len(ids), end == "stop")
            trajectory.append_context(prompt_ids[answer.start :])
            trajectory.append(ids, sequence.logprobs[sampled], turn)
    trajectory.prompt = prompt_texts[1]
    trajectory.turns = [turns[turn] for turn in sorted(turns)]
    for turn, record in enumerate(trajectory.turns[:-1], start=1):
        record.answer = [{"role": "agent", "content": prompt_texts[turn + 1]}]
    # Assign the rewards to turns.
    begin = 0
    for count, reward in session.rewards.items():
        rewarded = (turn_of[answer] for answer in session.answers[begin:count])
        record = trajectory.turns[max(rewarded, default=1) - 1]
        record.reward, record.parts = reward.score, reward.parts
        begin = count
    trajectory.turns[-1].info = dict(info)
    return trajectory
