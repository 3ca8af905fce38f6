"""minipaged beside the other engines that can be imported here: same model file, same prompts, same machine, in turn.

Run: python -m benchmarks.peers (--help for its options). The last line of standard output is one JSON object; see
docs/performance.md for what it holds and `measures` for the exact meaning of each figure.
"""
