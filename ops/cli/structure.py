"""What the command line's flags say every answer must look like."""

from pathlib import Path

from downcore.v1 import generation_pb2

from ops.cli.errors import CliError, ExitCode


def make_structure(
    *, json_schema: Path | None, regex: str | None, grammar: Path | None, choices: list[str], any_json: bool
) -> generation_pb2.StructuredOutput | None:
    """The structure that one of the flags asks for; None where none does.

    Raises:
        CliError: several ask, or a file cannot be read as UTF-8.
    """
    given = [json_schema is not None, regex is not None, grammar is not None, bool(choices), any_json]
    if sum(given) > 1:
        raise CliError(ExitCode.USAGE, "--json-schema, --regex, --grammar, --choice and --json exclude each other")
    if json_schema is not None:
        return generation_pb2.StructuredOutput(json_schema=_read(json_schema))
    if grammar is not None:
        return generation_pb2.StructuredOutput(grammar=_read(grammar))
    if regex is not None:
        return generation_pb2.StructuredOutput(regex=regex)
    if choices:
        return generation_pb2.StructuredOutput(choice=generation_pb2.Choices(values=choices))
    return generation_pb2.StructuredOutput(json_object=generation_pb2.JsonObject()) if any_json else None


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise CliError(ExitCode.USAGE, f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CliError(ExitCode.USAGE, f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
