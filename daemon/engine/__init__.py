"""The engine process: pools, scheduler, steps. One thread touches its state."""
