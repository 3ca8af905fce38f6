"""What tests/ops/cuda/test_ops.py asserts on the fake GPU, on a real one."""

from __future__ import annotations

from tests.ops.cuda.test_ops import (  # noqa: F401 (collected here)
    model,
    model_with_norms,
    test_a_graph_keeps_its_own_place_when_others_run_between,
    test_block_tables_travel_as_what_changed,
    test_blocks,
    test_choosing_tokens,
    test_steps_of_any_kind_with_and_without_graphs,
    test_steps_that_nobody_waits_for_do_not_overwrite_each_other,
    test_weights_in_every_encoding,
)
