"""Rules for corrections of rollouts that the trained policy did not sample."""

from typing import TYPE_CHECKING

from aligner.config.roles.sampling import CorrectionConfig
from aligner.errors import ConfigError

if TYPE_CHECKING:
    from aligner.config.run import RunConfig

_KEY = "model.ppo.correction"


def check_correction(config: "RunConfig") -> None:
    """Refuse bounds that nothing can meet, and options that cancel one another."""
    ppo = config.model.ppo
    correction, cap = ppo.correction, ppo.truncated_importance_sampling
    _check_bounds(correction)
    named = f"{_KEY}.weights={correction.weights}"
    if correction.weights == "none":
        _check_no_weights(correction)
    elif cap is not None:
        raise ConfigError(
            f"model.ppo.truncated_importance_sampling={cap:g} is {_KEY}.weights={ppo.ratio_level} "
            f"with {_KEY}.bounds=[0,{cap:g}], and {named} is given, too; leave one of them out"
        )
    if correction.weights == "token" and ppo.ratio_level == "sequence":
        raise ConfigError(
            f"{named} with model.ppo.ratio_level=sequence: a response has one ratio there, and one "
            f"weight goes with it; set {_KEY}.weights=sequence"
        )
    if correction.old_logprobs == "sampler":
        _check_sampler_as_old_policy(correction, cap)


def _check_bounds(correction: CorrectionConfig) -> None:
    for name in ("bounds", "geometric_bounds"):
        bounds = getattr(correction, name)
        if bounds is not None and not (bounds[0] <= 1 <= bounds[1] and bounds[0] < bounds[1]):
            raise ConfigError(
                f"{_KEY}.{name}=[{bounds[0]:g},{bounds[1]:g}]: where sampler and trainer agree the "
                "ratio is 1, which must lie between them; give low <= 1 <= high, such as [0.5,2.0]"
            )


def _check_no_weights(correction: CorrectionConfig) -> None:
    defaults = CorrectionConfig()
    for name in ("bounds", "outside"):
        value = getattr(correction, name)
        if value != getattr(defaults, name):
            shown = f"[{value[0]:g},{value[1]:g}]" if isinstance(value, tuple) else value
            raise ConfigError(
                f"{_KEY}.{name}={shown} is of the weights, and {_KEY}.weights=none; set it to "
                "token or sequence, or leave the key out"
            )


def _check_sampler_as_old_policy(correction: CorrectionConfig, cap: float | None) -> None:
    named = f"{_KEY}.old_logprobs=sampler"
    if correction.weights != "none" or cap is not None:
        other = (
            f"model.ppo.truncated_importance_sampling={cap:g}"
            if cap is not None
            else f"{_KEY}.weights={correction.weights}"
        )
        raise ConfigError(
            f"{named} has the loss's ratio begin at the sampler, so nothing is left for {other} to "
            "weigh; leave one of them out"
        )
    if correction.second_moment is not None:
        raise ConfigError(
            f"{_KEY}.second_moment={correction.second_moment:g} compares the sampler with the "
            f"trainer's log-probs before training, which {named} leaves out; set "
            f"{_KEY}.old_logprobs=trainer"
        )


def check_recorded(config: "RunConfig") -> None:
    """Refuse to record what nothing keeps, or nobody records."""
    ppo, backend = config.model.ppo, config.generation.backend
    most, sampling = ppo.record_kept_tokens, ppo.sampling_params
    named = f"model.ppo.record_kept_tokens={most}"
    if not most:
        return
    if sampling.top_k == 0 and sampling.top_p == 1:
        raise ConfigError(
            f"{named}: top_k=0 and top_p=1 keep all tokens; set it to 0, or one of "
            "model.ppo.sampling_params.top_k and top_p"
        )
    if sampling.top_k > most:
        raise ConfigError(
            f"{named} is below model.ppo.sampling_params.top_k={sampling.top_k}, so that nothing "
            f"would be recorded; set it to {sampling.top_k}"
        )
    if backend == "vllm":
        _check_recorded_by_vllm(config, named)


def _check_recorded_by_vllm(config: "RunConfig", named: str) -> None:
    """Refuse what vLLM's sampling masks do not have (docs/corrections.md)."""
    sampling, validation = config.model.ppo.sampling_params, config.validation
    named = f"{named} with generation.backend=vllm"
    if sampling.top_k == 0 or (validation.top_k == 0 and not validation.use_greedy):
        key = "validation.top_k" if sampling.top_k else "model.ppo.sampling_params.top_k"
        raise ConfigError(
            f"{named}: vLLM says what it kept only where top-k bounds it, and {key}=0; set it to "
            "the most tokens that may be kept, or generation.backend=megatron"
        )
    if sampling.use_greedy:
        raise ConfigError(
            f"{named}: vLLM takes model.ppo.sampling_params.use_greedy=true for top_k=1 there, so "
            "that a set would be the token alone; set it to false, or the former to 0"
        )
