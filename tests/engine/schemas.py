"""Random JSON Schemas of bounded values, and whether a value has one: the tests' own reading of what a schema says."""

import random
from typing import Any

NAMES = ("a", "name", "is_there", "é", 'with "quotes"', "x/y")


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """An object at the top; below it whatever comes."""
    kinds = ["integer", "boolean", "null", "string", "enum"] + (["object", "array"] if depth < 3 else [])
    kind = "object" if depth == 0 else rng.choice(kinds)
    match kind:
        case "object":
            names = rng.sample(NAMES, rng.randint(1, 4))
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth + 1) for name in names},
                "required": rng.sample(names, rng.randint(0, len(names))),
                "additionalProperties": False,
            }
        case "array":
            low = rng.randint(0, 2)
            return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": low, "maxItems": low + 2}
        case "integer":
            low = rng.randint(-1000, 1000)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
        case "string":
            low = rng.randint(0, 3)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 6)}
        case "enum":
            return {"enum": rng.sample(["one", "two", 3, None, True, [1, 2], {"k": "v"}], 3)}
        case _:
            return {"type": kind}


def has_schema(value: Any, schema: dict[str, Any]) -> bool:
    """Whether the value is as such a schema says."""
    if "enum" in schema:
        return any(value == allowed and type(value) is type(allowed) for allowed in schema["enum"])
    match schema["type"]:
        case "object":
            known = schema["properties"]
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= set(value) <= set(known)
                and all(has_schema(inner, known[name]) for name, inner in value.items())
            )
        case "array":
            return (
                isinstance(value, list)
                and schema["minItems"] <= len(value) <= schema["maxItems"]
                and all(has_schema(inner, schema["items"]) for inner in value)
            )
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            return isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]
        case "boolean":
            return isinstance(value, bool)
        case _:
            return value is None
