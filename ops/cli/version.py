"""downcore version."""

from importlib.metadata import version

from ops.cli.errors import CliError, ExitCode


def run(arguments: list[str]) -> int:
    """Prints the version of the installed package."""
    if arguments:
        raise CliError(ExitCode.USAGE, "version takes no arguments")
    print(version("downcore"))
    return ExitCode.OK
