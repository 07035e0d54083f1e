"""Fine-tuning from Python: a small random model learns ten sums. Half a minute on a CPU."""

import aligner

result = aligner.train_sft(
    model="models/tiny.nemo",
    data=[{"prompt": f"{i} + 1 = ", "response": f"{i + 1}"} for i in range(9)] * 8,
    max_steps=60,
    lr=3e-3,
    batch_size=24,
    output_dir="results/python_sft",
)
print(result.metrics[-1]["train_optim/loss"], result.generate(["3 + 1 = "], greedy=True))
