"""DPO from Python: a small random model learns to prefer digits. Half a minute on a CPU."""

import aligner

result = aligner.train_dpo(
    model="models/tiny.nemo",
    data=[
        {"prompt": f"{i % 9} + 1 = ", "chosen": f"{i % 9 + 1}", "rejected": "no"} for i in range(72)
    ],
    max_steps=20,
    lr=3e-3,
    batch_size=24,
    output_dir="results/python_dpo",
)
accuracy = result.metrics[-1]["train_optim/accuracy"]
print(accuracy, result.policy.logprobs(["1 + 1 = "] * 2, ["2", "no"]))
