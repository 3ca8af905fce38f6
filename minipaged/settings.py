"""EngineSettings: the fields of EngineConfig as keyword arguments that type checkers and editors know."""

from __future__ import annotations

import dataclasses
import difflib
from typing import TypedDict

from minipaged.config import DeviceName, Dtype, EngineConfig, KVDtype, PreemptionMode
from minipaged.errors import ConfigError


class EngineSettings(TypedDict, total=False):
    """See `EngineConfig`."""

    device: DeviceName
    max_model_len: int | None
    max_running: int
    max_batched_tokens: int | None
    max_waiting: int
    block_size: int
    num_blocks: int | None
    kv_cache_memory: int | None
    memory_fraction: float
    swap_memory: int
    swap_blocks: int | None
    kv_dtype: KVDtype
    dtype: Dtype
    cuda_graphs: bool
    prefix_caching: bool
    preemption: PreemptionMode
    swap_bandwidth: float
    overlap: bool
    num_threads: int | None
    debug: bool


def merge_settings(config: EngineConfig | None, settings: EngineSettings) -> EngineConfig:
    """`config`, or the defaults, with some fields replaced. Raises `ConfigError` for an unknown or wrong one."""
    known = [field.name for field in dataclasses.fields(EngineConfig)]
    for name in settings:
        if name not in known:
            similar = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {similar[0]!r}?" if similar else f"the settings are {', '.join(known)}."
            raise ConfigError(f"There is no engine setting {name!r}; {hint}")
    return EngineConfig(**settings) if config is None else dataclasses.replace(config, **settings)
