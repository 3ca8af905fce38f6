"""PreemptionPolicy: whether a preempted sequence's KV goes to the host or is computed again."""

from __future__ import annotations

from minipaged.config import EngineConfig
from minipaged.kv.ledger import recompute_seconds, swap_seconds
from minipaged.step import StepPlan, StepResult

SMOOTHING = 0.2
"""Weight of the latest step in the estimate of prefill speed."""


class PreemptionPolicy:
    """Compares bytes / bandwidth with tokens x prefill cost, unless the settings force one of them."""

    def __init__(self, config: EngineConfig, block_bytes: int) -> None:
        self._config = config
        self._block_bytes = block_bytes
        self._tokens_per_second: float | None = None

    def prefers_swap(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether moving the blocks out and back in is cheaper than computing the tokens again."""
        if self._config.preemption != "auto":
            return self._config.preemption == "swap"
        if self._tokens_per_second is None:
            return True
        swap = swap_seconds(num_blocks, self._block_bytes, self._config.swap_bandwidth)
        return swap < recompute_seconds(num_tokens, self._tokens_per_second)

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Learn the speed of prefill from a step that is mostly prefill."""
        tokens = plan.num_tokens
        is_mostly_prefill = tokens > 2 * len(plan.decode_rows) and tokens >= self._config.block_size
        if is_mostly_prefill and result.forward_seconds > 0:
            rate = tokens / result.forward_seconds
            known = rate if self._tokens_per_second is None else self._tokens_per_second
            self._tokens_per_second = (1 - SMOOTHING) * known + SMOOTHING * rate
