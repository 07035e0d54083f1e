"""A kind of environment of a user's own: a game whose opening is answered once, by its length."""

from aligner.algorithms.rollout.environments import ConversationRollouts
from aligner.algorithms.rollout.kinds import EnvironmentKind
from aligner.environments import Start
from aligner.environments.conversation import ChatRenderer, Conversation
from aligner.environments.pool import Call, EnvironmentPool
from aligner.generation.rows import Row
from aligner.parallel.collectives import is_rank_zero


class Toy(EnvironmentKind):
    @classmethod
    def problems(cls, key, run):
        if run.environment.max_turns > 1:
            yield f"{key}.max_turns: a toy has one turn; set it to 1"

    @classmethod
    def open(cls, config, tokenizer, architecture, columns, closing):
        pool = None
        if is_rank_zero():
            pool = EnvironmentPool(config.environment.factory, config.environment.kwargs, columns)
            closing.callback(pool.close)
        return ToyRollouts(config.environment, pool, tokenizer)


class ToyRollouts(ConversationRollouts):
    gather_s = 0.1

    def conduct(self, episode, seed, options):
        start = yield Call(episode.slot, "begin", (episode.seed, episode.columns), 60.0)
        conversation = Conversation(ChatRenderer(self._tokenizer), start)
        answer = yield Row(conversation.sequence, episode.sample_id, options)
        conversation.answered(answer.ids, answer.logprobs, answer.end == "stop")
        conversation.turns[-1].reward = float(len(answer.ids))
        return conversation, None


class Game:
    def __init__(self, seed, name):
        self.name = name

    def init(self):
        return Start([{"role": "user", "content": f"I am {self.name}"}])

    def step(self, message):
        raise NotImplementedError
