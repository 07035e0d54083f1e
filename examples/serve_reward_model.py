"""Serve a trained reward model over HTTP, for the rewards of other runs.

python examples/serve_reward_model.py --model results/reward/reward_model.nemo --port 5555 \
    --token-file reward.token

A run uses the server with `reward=server reward.server.url=http://HOST:5555`. SIGTERM ends the
server. docs/reward.md describes the protocol.
"""

import argparse
import sys

from aligner.errors import AlignerError, ConfigError
from aligner.http.tokens import read_token


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a .nemo file with a reward head")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (0.0.0.0: all)")
    parser.add_argument("--port", type=int, default=5555, help="port (0: any free port)")
    parser.add_argument("--token-env", help="environment variable with the bearer token")
    parser.add_argument("--token-file", help="file with the bearer token")
    parser.add_argument("--batch-size", type=int, default=64, help="sequences scored together")
    parser.add_argument("--micro-batch-size", type=int, default=16, help="... per forward pass")
    parser.add_argument("--max-waiting", type=int, default=4096, help="most queued sequences")
    parser.add_argument("--timeout", type=float, default=120.0, help="longest wait in seconds")
    parser.add_argument(
        "--add-bos",
        action="store_true",
        default=None,
        help="begin sequences with BOS (for files without this setting)",
    )
    parser.add_argument("--precision", choices=["32", "bf16"], default="32")
    parser.add_argument(
        "--tensor-model-parallel-size", type=int, default=1, help="processes of torchrun"
    )
    return parser.parse_args()


def main() -> None:
    """Serve until SIGTERM."""
    arguments = parse_arguments()
    try:
        from aligner.rewards.server.serve import ServeOptions, serve_reward_model  # imports torch

        token = read_token(arguments.token_env, arguments.token_file, "the reward server")
        if token is None and arguments.host not in ("127.0.0.1", "localhost", "::1"):
            raise ConfigError(
                f"--host {arguments.host} accepts other machines. Give --token-env or --token-file"
            )
        serve_reward_model(
            ServeOptions(
                model=arguments.model,
                host=arguments.host,
                port=arguments.port,
                token=token,
                batch_size=arguments.batch_size,
                micro_batch_size=arguments.micro_batch_size,
                max_waiting=arguments.max_waiting,
                timeout_s=arguments.timeout,
                add_bos=arguments.add_bos,
                precision=arguments.precision,
                tensor_model_parallel_size=arguments.tensor_model_parallel_size,
            ),
            ready=lambda line: print(line, flush=True),
        )
    except AlignerError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
