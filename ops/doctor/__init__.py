"""Is this machine fit to run the daemon: checks of software, disk, accelerator, limits and clock."""
