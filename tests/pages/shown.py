"""Whether an output is what a page shows.

A page shows an output as it was. Compared is everything but what must differ: times ("7.9 s"), the length of rules and
the width of columns, and prefixes' keys, which depend on the machine, but must be the same wherever the page has the
same. `…` stands for a part of a line, a line `...` for any number of lines.
"""

import re

_KEY = r"\b[0-9a-f]{64}\b|\b[0-9a-f]{12}\b"
_TIME = r"\d[\d,.]* ?(?:µs|ms|s|m|h|d)(?: \d+ ?(?:s|m|h|d))?\b"  # 345 ms, 7.9 s, 1m 17s
_PARTS = re.compile(rf"(?P<any>…)|(?P<key>{_KEY})|(?P<time>\b{_TIME})|(?P<space>\s+)|(?P<rule>─+)")
SHORT = 12  # digits of a key that tables show


class Shown:
    """One reading of a page: `keys` are the page's keys, and what they are here."""

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}

    def typed(self, command: str) -> str:
        """The command with the keys of this machine."""
        return re.sub(_KEY, lambda found: self.keys.get(found[0], found[0]), command)

    def matches(self, shown: tuple[str, ...], printed: str) -> bool:
        """Whether the output is what is shown. Takes note of the keys that are new."""
        names: dict[str, str] = {}
        pattern = "".join(
            r"(?:.*\n)*?" if line.strip() == "..." else self._line(line, names) + r"\s*\n" for line in shown
        )
        found = re.fullmatch(pattern, printed if not printed or printed.endswith("\n") else printed + "\n")
        if found is None:
            return False
        for key, name in names.items():
            self._learn(key, found[name])
        return True

    def _line(self, line: str, names: dict[str, str]) -> str:
        """A regular expression for a line; `names` are the groups that hold keys seen for the first time."""
        pieces: list[str] = []
        at = 0
        for part in _PARTS.finditer(line.rstrip()):
            pieces.append(re.escape(line[at : part.start()]))
            at = part.end()
            match part.lastgroup:
                case "any":
                    pieces.append(".*?")
                case "time":
                    pieces.append(_TIME)
                case "space":
                    pieces.append(r"\s+" if part.start() else r"\s*")
                case "rule":
                    pieces.append("─+")
                case _:
                    pieces.append(self._key(part[0], names))
        pieces.append(re.escape(line.rstrip()[at:]))
        return "".join(pieces)

    def _key(self, key: str, names: dict[str, str]) -> str:
        if key in self.keys:
            return self.keys[key]
        known = self.keys.get(key[:SHORT])
        if known is not None:  # its beginning is known from a table
            names[key] = f"k{len(names)}"
            return rf"(?P<{names[key]}>{known}[0-9a-f]{{{len(key) - SHORT}}})"
        if key in names:
            return rf"(?P={names[key]})"
        names[key] = f"k{len(names)}"
        return rf"(?P<{names[key]}>[0-9a-f]{{{len(key)}}})"

    def _learn(self, key: str, here: str) -> None:
        self.keys[key] = here
        self.keys[key[:SHORT]] = here[:SHORT]
