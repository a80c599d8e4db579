"""config.json, read with suspicion: each value is checked for type and bounds where it is taken."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from daemon.layers.rope import RopeConfig, RopeKind
from daemon.weights.errors import ConfigError

MAX_CONFIG_BYTES = 4 << 20
MAX_SIZE = 1 << 31  # of any one dimension or count


class Fields:
    """The values of one JSON object; messages name the key by its full path."""

    def __init__(self, values: Mapping[str, object], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def has(self, key: str) -> bool:
        """The key is there and not null."""
        return self.values.get(key) is not None

    def count(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE) -> int:
        """A whole number in [least, most]."""
        value = self._take(key, default)
        if type(value) is not int or not least <= value <= most:
            raise self.fail(key, f"must be a whole number from {least} to {most}, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self._take(key, default)
        if type(value) not in (int, float) or not 0 < cast(float, value) < math.inf:
            raise self.fail(key, f"must be a positive number, not {value!r}")
        return float(cast(float, value))

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._take(key, default)
        if type(value) is not bool:
            raise self.fail(key, f"must be true or false, not {value!r}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._take(key, default)
        if not isinstance(value, str):
            raise self.fail(key, f"must be a string, not {value!r}")
        return value

    def counts(self, key: str, *, least: int = 0) -> tuple[int, ...]:
        """A list of natural numbers, or one of them alone; absent is empty."""
        value = self.values.get(key)
        if value is None:
            return ()
        items = cast(list[object], value) if isinstance(value, list) else [value]
        if not all(type(item) is int and least <= item < MAX_SIZE for item in items):
            raise self.fail(key, f"must be whole numbers from {least}")
        return tuple(cast(list[int], items))

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; absent is empty."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in cast(list[object], value)):
            raise self.fail(key, "must be a list of strings")
        return tuple(cast(list[str], value))

    def section(self, key: str) -> "Fields | None":
        """A JSON object; None where absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(key, "must be an object")
        return Fields(cast(dict[str, object], value), f"{self.where}: {key}")

    def require(self, key: str, *allowed: object) -> None:
        """Refuses a value that this daemon does not do; an absent key is the first of those allowed."""
        value = self.values.get(key, allowed[0])
        if value not in allowed:
            choices = " or ".join(repr(choice) for choice in allowed)
            raise self.fail(key, f"{value!r} is not supported, only {choices}")

    def fail(self, key: str, what: str) -> ConfigError:
        """The error to raise about a key."""
        return ConfigError(f"{self.where}: {key} {what}"[:500])

    def _take(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise self.fail(key, "is missing")
        return default


def read_json(path: Path) -> Fields:
    """A JSON object from a file of the folder.

    Raises:
        ConfigError: it is absent, too large, or not a JSON object.
    """
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path.name}: larger than {MAX_CONFIG_BYTES} bytes")
        content: object = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path.name}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path.name}: not JSON") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path.name}: not a JSON object")
    return Fields(cast(dict[str, object], content), path.name)


def rope_config(fields: Fields, head_dim: int) -> RopeConfig:
    """The rotation that a configuration asks for, in either of the two spellings that checkpoints use."""
    rule = fields.section("rope_parameters") or fields.section("rope_scaling") or Fields({}, fields.where)
    theta = rule.number("rope_theta") if rule.has("rope_theta") else fields.number("rope_theta", 10000.0)
    name = rule.text("rope_type", rule.text("type", "default"))
    if name not in set(RopeKind):
        raise rule.fail("rope_type", f"{name!r} is not supported, only {', '.join(sorted(RopeKind))}")
    kind = RopeKind(name)
    share = rule if rule.has("partial_rotary_factor") else fields
    rotary_dim = int(head_dim * share.number("partial_rotary_factor", 1.0))
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise share.fail("partial_rotary_factor", f"makes {rotary_dim} of {head_dim} dimensions rotate")
    factor = 1.0 if kind is RopeKind.DEFAULT else rule.number("factor")
    low, high = rule.number("low_freq_factor", 1.0), rule.number("high_freq_factor", 4.0)
    if low >= high:
        raise rule.fail("low_freq_factor", f"must be below high_freq_factor, {low} is not below {high}")
    return RopeConfig(
        theta=theta,
        rotary_dim=rotary_dim,
        kind=kind,
        factor=factor,
        original_max_tokens=rule.count(
            "original_max_position_embeddings", fields.count("max_position_embeddings", 2048)
        ),
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=rule.number("beta_fast", 32.0),
        beta_slow=rule.number("beta_slow", 1.0),
        truncate=rule.flag("truncate", True),
        attention_factor=rule.number("attention_factor") if rule.has("attention_factor") else None,
        mscale=rule.number("mscale") if rule.has("mscale") else None,
        mscale_all_dim=rule.number("mscale_all_dim") if rule.has("mscale_all_dim") else None,
    )


def context_tokens(fields: Fields, rope: RopeConfig | None, default: int) -> int:
    """The longest sequence a configuration allows; YaRN stretches its original length by its factor."""
    longest = fields.count("max_position_embeddings", default)
    if rope is not None and rope.kind is RopeKind.YARN:
        return max(longest, int(rope.original_max_tokens * rope.factor))
    return longest
