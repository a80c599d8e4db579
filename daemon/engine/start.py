"""Makes an engine ready: device and precision, weights, budgets, pools, digests."""

CPU_GRID, GPU_GRID = 1024, 4096  # tokens
FORMAT_VERSION = b"1"  # of images and keys; a change here makes every older byte unreadable, on purpose
CHECKPOINT_SHARE = 0.25  # of the budget, the most that slots for checkpoints may take
