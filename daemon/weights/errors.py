"""What can be wrong with a model folder: one tree, raised while loading and nowhere else."""


class LoadError(Exception):
    """The folder cannot be served. The message says what is wrong, without the folder's own path."""


class ConfigError(LoadError):
    """config.json is unreadable, or asks for something this daemon does not do."""


class CheckpointError(LoadError):
    """A weights file is damaged, hostile, or does not match the configuration."""
