"""HostTier: the host blocks of swapped-out sequences, and the copies under way between the two tiers."""

from __future__ import annotations

from dataclasses import dataclass

from minipaged.kv.blocks import BlockPool


@dataclass(frozen=True, slots=True)
class PendingTransfer:
    """A copy not yet known to be finished, and the blocks it owns meanwhile, so that nobody reuses them."""

    device_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]


class HostTier:
    """A pool of host blocks and the transfers that own blocks on either tier until they are finished."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self._pending: dict[int, PendingTransfer] = {}
        self._last_id = 0

    @property
    def num_pending(self) -> int:
        """Transfers not yet known to be finished."""
        return len(self._pending)

    @property
    def num_device_blocks_pending(self) -> int:
        """Device blocks that unfinished transfers own and will give back."""
        return sum(len(transfer.device_blocks) for transfer in self._pending.values())

    def start(self, transfer: PendingTransfer) -> int:
        """Register a transfer that owns blocks; returns its id."""
        self._last_id += 1
        self._pending[self._last_id] = transfer
        return self._last_id

    def is_pending(self, transfer_id: int) -> bool:
        """Whether the transfer may still be running."""
        return transfer_id in self._pending

    def finish(self, transfer_id: int) -> tuple[int, ...]:
        """The transfer is done: release its host blocks; returns its device blocks for the caller to release."""
        transfer = self._pending.pop(transfer_id)
        self.release(transfer.host_blocks)
        return transfer.device_blocks

    def release(self, blocks: tuple[int, ...] | list[int]) -> None:
        """One reference less to each host block."""
        for block in blocks:
            self.pool.release(block, keep=False)

    def pending(self) -> list[PendingTransfer]:
        """All transfers under way."""
        return list(self._pending.values())
