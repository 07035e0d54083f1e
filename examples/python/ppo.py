"""PPO with a critic from Python: the task of grpo.py. Half a minute on a CPU."""

import aligner


def reward(prompts: list[str], responses: list[str], **columns: list) -> list[float]:
    """Return 1 for each response that begins with a digit."""
    return [float(response[:1].isdigit()) for response in responses]


result = aligner.train_ppo(
    model="models/tiny.nemo",
    data=[{"prompt": f"{i % 5} + {i % 7} = "} for i in range(64)],
    reward=reward,
    max_steps=30,
    lr=6e-3,
    critic_lr=6e-3,
    samples_per_step=64,
    max_new_tokens=4,
    output_dir="results/python_ppo",
)
print(result.metrics[-1]["train_rollouts/rewards"], result.generate(["2 + 2 = "]))
