"""EngineConfig: every setting of an engine, validated when constructed."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Literal, get_args

from minipaged.errors import ConfigError

DeviceName = Literal["auto", "cpu", "cuda", "reference"]
Dtype = Literal["auto", "float16", "bfloat16"]
KVDtype = Literal["auto", "float32", "float16", "bfloat16"]
PreemptionMode = Literal["auto", "swap", "recompute"]
CHOICES = {"device": DeviceName, "kv_dtype": KVDtype, "dtype": Dtype, "preemption": PreemptionMode}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Raises `ConfigError` for a value out of range or two that contradict each other."""

    device: DeviceName = "auto"
    """auto: the fastest that works here. reference: plain NumPy, the specification."""
    max_model_len: int | None = None
    """Most tokens in a sequence, prompt and output. None: the model's limit, or what the block pool holds if less."""
    max_running: int = 256
    """Most sequences in a batch."""
    max_batched_tokens: int | None = None
    """Most tokens computed in one step: decodes first, then prefill chunks. Bounds how long a prompt delays them. None:
    2048 on a GPU, else 512; or `max_running` if that is more."""
    max_waiting: int = 1024
    """Most requests that wait; one more raises `EngineBusyError`."""
    block_size: int = 16
    """Tokens per KV block."""
    num_blocks: int | None = None
    """KV blocks in the pool. Excludes `kv_cache_memory`."""
    kv_cache_memory: int | None = None
    """Bytes for the block pool, used down to the last whole block. None: 1 GiB on the CPU, on a GPU what
    `memory_fraction` leaves; or what `max_running` needs if that is less."""
    memory_fraction: float = 0.9
    """How much of a GPU's memory to use, weights and KV cache and all, if the pool's size is not given: what others use
    counts too."""
    swap_memory: int = 0
    """Bytes of host memory for preempted sequences; 0: preemption always recomputes. Excludes `swap_blocks`."""
    swap_blocks: int | None = None
    """The same as a number of blocks."""
    kv_dtype: KVDtype = "auto"
    """Element type of the KV cache; auto: on the CPU bfloat16 if it multiplies in that, else float16; in the reference
    float32; on a GPU that of `dtype`."""
    dtype: Dtype = "auto"
    """Element type of weights and activations on a GPU; auto: bfloat16 if the weights are, else float16."""
    cuda_graphs: bool = True
    """Launch a decode step on a GPU as a whole, not kernel by kernel. The results are the same."""
    prefix_caching: bool = True
    """Reuse KV blocks of equal prompt beginnings."""
    preemption: PreemptionMode = "auto"
    """auto: swap if bytes / bandwidth is less than tokens x prefill cost, else recompute."""
    swap_bandwidth: float = 10e9
    """Bytes per second between device and host, each way, as assumed for that choice."""
    overlap: bool = True
    """Plan and queue the next step while the previous one runs and is delivered."""
    num_threads: int | None = None
    """Threads for CPU kernels; None: physical cores."""
    debug: bool = False
    """Check the invariants after every step and fill fresh KV blocks with NaN. Slow."""

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            _one_of(name, getattr(self, name), get_args(choices))
        for name in ("prefix_caching", "overlap", "debug", "cuda_graphs"):
            _one_of(name, getattr(self, name), (True, False))
        for name in ("max_running", "max_waiting", "block_size"):
            _at_least(name, getattr(self, name), 1)
        for name in ("max_model_len", "max_batched_tokens", "num_blocks", "kv_cache_memory", "num_threads"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        _at_least("swap_memory", self.swap_memory, 0)
        if self.swap_blocks is not None:
            _at_least("swap_blocks", self.swap_blocks, 0)
        if not isinstance(self.swap_bandwidth, Real) or not 0 < self.swap_bandwidth < float("inf"):
            raise ConfigError(f"EngineConfig.swap_bandwidth is {self.swap_bandwidth!r}; expected a finite number > 0.")
        if not isinstance(self.memory_fraction, Real) or not 0 < self.memory_fraction <= 1:
            raise ConfigError(
                f"EngineConfig.memory_fraction is {self.memory_fraction!r}; expected a number > 0 and at most 1."
            )
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise ConfigError("num_blocks and kv_cache_memory both size the block pool; give one of them.")
        if self.swap_blocks is not None and self.swap_memory:
            raise ConfigError("swap_blocks and swap_memory both size the host pool; give one of them.")
        if self.max_batched_tokens is not None and self.max_batched_tokens < self.max_running:
            raise ConfigError(
                f"max_batched_tokens is {self.max_batched_tokens}, less than max_running ({self.max_running}); "
                "every running sequence decodes one token per step, so give at least as many tokens."
            )


def _one_of(name: str, found: object, choices: tuple[object, ...]) -> None:
    if not any(type(found) is type(choice) and found == choice for choice in choices):
        expected = ", ".join(map(repr, choices))
        raise ConfigError(f"EngineConfig.{name} is {found!r}; expected one of {expected}.")


def _at_least(name: str, found: int, least: int) -> None:
    if isinstance(found, bool) or not isinstance(found, int) or found < least:
        raise ConfigError(f"EngineConfig.{name} is {found!r}; expected an integer >= {least}.")
