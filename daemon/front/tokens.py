"""Bearer tokens: their text, and what a file may know of them.

A token is `dct_NAME.SECRET`: NAME is a principal's, so that no search reveals by its time which tokens exist, and
SECRET is 32 random bytes in base64url. The file of principals holds `sha256:SALT:DIGEST`. A fast hash is the right one:
a slow one makes guessing a poor secret dear, and 256 random bits are guessed by nobody, at any speed. The salt keeps
equal secrets in two files from looking equal.
"""

import hashlib
import hmac
import re
from dataclasses import dataclass

_TOKEN = re.compile(r"dct_([A-Za-z0-9_-]{1,64})\.([A-Za-z0-9_-]{43})")
_HASH = re.compile(r"sha256:([0-9a-f]{32}):([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Token:
    """A token as a caller presents it. Its text is never logged and never in an error."""

    name: str
    secret: str

    @staticmethod
    def parse(text: str) -> "Token | None":
        """The parts of a token; None where the text is none."""
        found = _TOKEN.fullmatch(text)
        return Token(found[1], found[2]) if found else None


@dataclass(frozen=True, slots=True)
class TokenHash:
    """What is kept of a token."""

    salt: bytes
    digest: bytes

    @staticmethod
    def parse(text: str) -> "TokenHash":
        """From `sha256:SALT:DIGEST`, both in lower-case hexadecimal digits.

        Raises:
            ValueError: it is written otherwise.
        """
        found = _HASH.fullmatch(text)
        if found is None:
            raise ValueError("a token's hash is sha256:SALT:DIGEST, as `downcore token new` prints it")
        return TokenHash(bytes.fromhex(found[1]), bytes.fromhex(found[2]))

    def matches(self, secret: str) -> bool:
        """Whether it is this secret's, in a time that does not depend on the answer."""
        return hmac.compare_digest(hashlib.sha256(self.salt + secret.encode()).digest(), self.digest)


NOBODY = TokenHash(bytes(16), bytes(32))  # compared with where no principal has the name
