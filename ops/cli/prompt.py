"""Where a prompt comes from: the command line, a file, or stdin."""

import sys
from pathlib import Path

from downcore.v1 import generation_pb2

from ops.cli.errors import CliError, ExitCode


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The text of exactly one of the two; "-" is stdin.

    Raises:
        CliError: none or both are given, or the text cannot be read as UTF-8.
    """
    if (prompt is None) == (prompt_file is None):
        raise CliError(ExitCode.USAGE, "give a prompt or --prompt-file, one of them; - reads stdin")
    try:
        if prompt_file is not None and str(prompt_file) != "-":
            return prompt_file.read_bytes().decode("utf-8")
        return prompt if prompt is not None and prompt != "-" else sys.stdin.buffer.read().decode("utf-8")
    except OSError as error:
        raise CliError(ExitCode.USAGE, f"{prompt_file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CliError(ExitCode.USAGE, f"the prompt is not UTF-8: {error.reason} at byte {error.start}") from None


def make_chat(text: str, system: str | None) -> generation_pb2.Chat:
    """One user message, after a system message where there is one."""
    messages = [generation_pb2.ChatMessage(role="system", content=system)] if system is not None else []
    return generation_pb2.Chat(messages=[*messages, generation_pb2.ChatMessage(role="user", content=text)])
