"""The rotary embedding that a Hugging Face config.json describes, in each of its generations.

Oldest: `rope_theta` and `rope_scaling` with `type`; then `rope_scaling` with `rope_type`; newest: `rope_parameters`,
which holds rope_theta too, and may hold one such object per layer type.
"""

from __future__ import annotations

from minipaged.errors import ModelLoadError
from minipaged.models.config import DefaultRope, LinearRope, Llama3Rope, RopeScaling, YarnRope
from minipaged.models.files.fields import Fields

KEYS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
"""The kinds of scaling, and what each reads."""

_COMMON_KEYS = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor", "finetuned"})
_DEFAULT_THETA = 10000.0


def parse_rope(config: Fields) -> tuple[float, RopeScaling]:
    """rope_theta and the scaling. Raises `ModelLoadError`, also for two descriptions that contradict each other."""
    whole_head(config)
    readings = [
        _parse_parameters(parameters, config)
        for key in ("rope_parameters", "rope_scaling")
        for parameters in _per_layer_type(config.within(key))
    ]
    if not readings:
        return config.number("rope_theta", _DEFAULT_THETA, above=1), DefaultRope()
    if any(reading != readings[0] for reading in readings):
        raise ModelLoadError(
            f"{config.where}: rope_parameters and rope_scaling describe different rotary embeddings, {readings}; "
            "expected one for the whole model. Models that rotate differently in some layers cannot be loaded."
        )
    return readings[0]


def whole_head(fields: Fields) -> None:
    """Refuse models that rotate only a part of each head."""
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.wrong("partial_rotary_factor", "1: only models that rotate whole heads can be loaded")


def _per_layer_type(parameters: Fields | None) -> list[Fields]:
    if parameters is None:
        return []
    nested = [
        Fields(value, f"{parameters.where}, {layer_type}")
        for layer_type, value in parameters.values.items()
        if isinstance(value, dict)
    ]
    return nested if len(nested) == len(parameters.values) else [parameters]


def _parse_parameters(parameters: Fields, config: Fields) -> tuple[float, RopeScaling]:
    kind = _kind(parameters)
    unread = sorted(parameters.values.keys() - KEYS[kind] - _COMMON_KEYS)
    # Some files state the original context whatever the kind; no rule of these two kinds depends on it.
    if unread and not (unread == ["original_max_position_embeddings"] and kind in ("default", "linear")):
        raise ModelLoadError(
            f"{parameters.where} holds {', '.join(unread)}, which a scaling of kind {kind!r} does not have "
            f"(it has {', '.join(sorted(KEYS[kind])) or 'no parameters'}). The model may need a newer version of "
            "this library."
        )
    whole_head(parameters)
    theta = parameters.number("rope_theta", config.number("rope_theta", _DEFAULT_THETA, above=1), above=1)
    if config.get("rope_theta") is not None and theta != config.number("rope_theta"):
        raise parameters.wrong("rope_theta", f"{config.get('rope_theta')}, as rope_theta at the top of the file says")
    return theta, _scaling(kind, parameters, config)


def _kind(parameters: Fields) -> str:
    old, new = parameters.get("type"), parameters.get("rope_type")
    if old is not None and new is not None and old != new:
        raise parameters.wrong("rope_type", f"the same as type, {old!r}")
    key = "rope_type" if new is not None or old is None else "type"
    kind = parameters.string(key, "default")
    if kind not in KEYS:
        raise parameters.wrong(key, f"one of {', '.join(KEYS)}. Models with other scaling kinds cannot be loaded")
    return kind


def _scaling(kind: str, parameters: Fields, config: Fields) -> RopeScaling:
    max_position_embeddings = config.integer("max_position_embeddings")
    match kind:
        case "linear":
            return LinearRope(factor=parameters.number("factor", at_least=1))
        case "llama3":
            low = parameters.number("low_freq_factor")
            high = parameters.number("high_freq_factor", above=low)
            return Llama3Rope(
                factor=parameters.number("factor", at_least=1),
                low_freq_factor=low,
                high_freq_factor=high,
                original_max_position_embeddings=parameters.integer("original_max_position_embeddings"),
            )
        case "yarn":
            original = parameters.integer("original_max_position_embeddings", max_position_embeddings)
            beta_slow = parameters.number("beta_slow", 1.0, above=0)
            beta_fast = parameters.number("beta_fast", 32.0, above=beta_slow)
            return YarnRope(
                factor=parameters.number("factor", max(max_position_embeddings / original, 1.0), at_least=1),
                original_max_position_embeddings=original,
                beta_fast=beta_fast,
                beta_slow=beta_slow,
                attention_factor=_optional_number(parameters, "attention_factor"),
                mscale=_optional_number(parameters, "mscale"),
                mscale_all_dim=_optional_number(parameters, "mscale_all_dim"),
                truncate=parameters.boolean("truncate", True),
            )
        case _:
            return DefaultRope()


def _optional_number(fields: Fields, key: str) -> float | None:
    return None if fields.get(key) is None else fields.number(key)
