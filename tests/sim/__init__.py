"""A simulated disk for the store: what was not synced is lost or torn, and every operation can fail or stall."""
