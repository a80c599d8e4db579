"""Structures that were made to hang, swell or crash whoever reads them, and what the client must be told of."""

import json
from dataclasses import dataclass

from downcore.v1 import generation_pb2 as pb

DEPTH = 100_000


@dataclass(frozen=True, slots=True)
class Hostile:
    """A structure, and the reason of its refusal; None where it is odd but harmless, and passes."""

    structure: pb.StructuredOutput
    reason: str | None = "INVALID_ARGUMENT"


def hostile_structures() -> dict[str, Hostile]:
    """By name. The large ones are over the limit of bytes, and have a smaller twin that is not."""
    return {
        "deep arrays": _schema("[" * DEPTH + "]" * DEPTH, "TOO_LARGE"),
        "deep items": _schema('{"items":' * DEPTH + "{}" + "}" * DEPTH, "TOO_LARGE"),
        "deep items within the bytes": _schema('{"items":' * 6_000 + "{}" + "}" * 6_000),
        "items as deep as the library reads": _schema('{"items":' * 110 + "{}" + "}" * 110),
        "deep groups": _regex("(" * DEPTH + "a" + ")" * DEPTH, "TOO_LARGE"),
        "deep groups within the bytes": _regex("(" * 30_000 + "a" + ")" * 30_000),
        "deep rules": _lark("start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
        "chain of rules": _lark(_chain("r", 4_000)),
        "chain of terminals": _lark(_chain("T", 4_000)),
        "circle of terminals": _lark('start: A\nA: B "x"\nB: A "y"'),
        "doubled terminals": _lark(_doubled(18)),
        "terminals doubled to the limit": _lark(_doubled(13)),
        "large terminals far from the start": _lark(_doubled(13).replace('"q"', '"q"{50}')),
        "intersections": _lark("start: A\nA: " + " & ".join(f"/(.*a.{{{i}}})/" for i in range(1, 30))),
        "many optionals": _regex("a?" * 20_000),
        "nested stars": _regex("(((((a*)*)*)*)*)*b", None),
        "alternatives that overlap": _regex("(a|a|aa)*" * 30 + "b", None),
        "nested repeats": _regex("((((a{1,1000}){1,1000}){1,1000}){1,1000})"),
        "look-ahead": _regex("(?=a)b"),
        "open group": _regex("("),
        "giant repeat": _schema('{"type":"string","maxLength":1000000000000}'),
        "giant divisor": _schema('{"type":"integer","multipleOf":9999999967}'),
        "many properties": _schema(json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(300)}}), None),
        "refers to itself": _schema('{"$ref":"#"}'),
        "refers to itself within": _schema('{"$defs":{"a":{"allOf":[{"$ref":"#/$defs/a"}]}},"$ref":"#/$defs/a"}'),
        "refers to a file": _schema('{"$ref":"file:///etc/passwd"}'),
        "refers to a host": _schema('{"$ref":"http://localhost:1/schema.json"}'),
        "refers nowhere": _schema('{"$ref":"#/$defs/none"}'),
        "references that double": _schema(json.dumps(_references(40)), None),
        "choices that multiply": _schema(
            json.dumps({"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(30)]})
        ),
        "unknown keyword": _schema('{"type":"object","unevaluatedProperties":false}'),
        "no JSON": _schema("{"),
        "number without end": _schema('{"minimum":' + "9" * 60_000 + "}"),
        "not a number": _schema('{"minimum":NaN}'),
        "nothing is allowed": _schema('{"type":"integer","minimum":2,"maximum":1}'),
        "no rule": _lark("x"),
        "ambiguous": _lark('start: x\nx: x x | "a" | ""', None),
    }


def recursive_but_sound() -> pb.StructuredOutput:
    """A tree: recursion as schemas are meant to have."""
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
    return _schema(json.dumps({"$defs": {"node": node}, "$ref": "#/$defs/node"})).structure


def _schema(text: str, reason: str | None = "INVALID_ARGUMENT") -> Hostile:
    return Hostile(pb.StructuredOutput(json_schema=text), reason)


def _regex(text: str, reason: str | None = "INVALID_ARGUMENT") -> Hostile:
    return Hostile(pb.StructuredOutput(regex=text), reason)


def _lark(text: str, reason: str | None = "INVALID_ARGUMENT") -> Hostile:
    return Hostile(pb.StructuredOutput(grammar=text), reason)


def _chain(name: str, length: int) -> str:
    links = "\n".join(f"{name}{i}: {name}{i + 1}" for i in range(length))
    return f'start: {name}0\n{links}\n{name}{length}: "a"'


def _doubled(times: int) -> str:
    rules = "\n".join(f"A{i}: A{i - 1} A{i - 1}" for i in range(1, times + 1))
    return f'start: "q" A{times}\nA0: "a"?\n{rules}'


def _references(count: int) -> dict[str, object]:
    doubled = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(count)}
    return {"$defs": {**doubled, f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}
