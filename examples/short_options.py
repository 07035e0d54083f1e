"""Short options of commands for interactive use, and the configuration keys that they set."""

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
    """Replace short options by overrides ``key=value`` with a quoted value.

    Other arguments are returned unchanged.

    Args:
        arguments: the command line without the name of the script.
        options: key that each option with a value sets.
        flags: override of each option without a value.
        repeated: key of a list to which each occurrence of an option adds a value.

    Raises:
        ConfigError: an option lacks its value.
    """
    flags, repeated = flags or {}, repeated or {}
    overrides: list[str] = []
    lists: dict[str, list[str]] = {}
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        if name in flags and not equals:
            overrides.append(flags[name])
        elif name in options or name in repeated:
            text = value if equals else next(remaining, None)
            if text is None:
                raise ConfigError(f"{name}: its value is missing. Write it as {name} VALUE")
            # A form that hydra and omegaconf parse back to the same text.
            quoted = QuotedString(text.replace("${", "\\${"), Quote.double).with_quotes()
            if name in options:
                overrides.append(f"{options[name]}={quoted}")
            else:
                lists.setdefault(repeated[name], []).append(quoted)
        else:
            overrides.append(argument)
    return [*overrides, *(f"{key}=[{','.join(values)}]" for key, values in lists.items())]
