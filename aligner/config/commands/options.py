"""Short options of commands that are used by hand, written as the keys that they stand for."""

from collections.abc import Mapping, Sequence

from hydra.core.override_parser.types import Quote, QuotedString

from aligner.errors import ConfigError

MODEL = {"--model": "model.restore_from_path"}
ASKING = {**MODEL, "--prompts": "data.prompts.source", "--output": "output"}
SERVING = {**MODEL, "--token-file": "server.token_file"}


def as_overrides(
    arguments: Sequence[str],
    options: Mapping[str, str],
    *,
    flags: Mapping[str, str] | None = None,
    repeated: Mapping[str, str] | None = None,
) -> list[str]:
    """``arguments`` with options replaced by ``key=value``, the value quoted; others stay.

    Args:
        arguments: what follows the name of the script.
        options: the key that an option with a value sets.
        flags: the override that an option without a value stands for.
        repeated: the key of a list, to which every such option adds a value.

    Raises:
        ConfigError: an option's value is missing.
    """
    flags, repeated = flags or {}, repeated or {}
    found: list[str] = []
    lists: dict[str, list[str]] = {}
    rest = list(arguments)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name in flags and not equals:
            found.append(flags[name])
        elif name in options or name in repeated:
            if not equals:
                if not rest:
                    raise ConfigError(f"{name}: its value is missing")
                value = rest.pop(0)
            if name in options:
                found.append(f"{options[name]}={_quoted(value)}")
            else:
                lists.setdefault(repeated[name], []).append(_quoted(value))
        else:
            found.append(f"{name}{equals}{value}")
    return [*found, *(f"{key}=[{','.join(values)}]" for key, values in lists.items())]


def _quoted(text: str) -> str:
    """``text`` as hydra and omegaconf read it back, whatever is in it."""
    return QuotedString(text.replace("${", "\\${"), Quote.double).with_quotes()
