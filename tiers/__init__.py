"""State by position: layouts, pools, keys, the prefix tree and the ledger. Knows no model family."""
