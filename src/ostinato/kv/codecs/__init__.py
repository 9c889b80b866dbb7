"""How a block's KV is written outside of the arena: bit by bit, or in fewer bits where that was asked for."""
