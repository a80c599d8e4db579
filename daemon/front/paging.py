"""Page tokens of ListPrefixes: where the last page ended, and of which list. To a client they are opaque."""

import base64
import math

import msgspec

from daemon.cache_messages import PrefixOrder, PrefixRow
from daemon.errors import ErrorReason, RequestError


class Cursor(msgspec.Struct, frozen=True, array_like=True):
    """The last row of a page of this list."""

    order: PrefixOrder
    key_prefix: str
    value: float  # what the list is ordered by
    key: str


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Cursor)


def token_after(row: PrefixRow, order: PrefixOrder, key_prefix: str) -> str:
    """The token of the page after this row."""
    match order:
        case PrefixOrder.RECENCY:
            value = row.last_use_time_s
        case PrefixOrder.BYTES:
            value = float(row.bytes.device + row.bytes.host + row.bytes.disk)
        case PrefixOrder.HITS:
            value = float(row.hits)
    cursor = Cursor(order, key_prefix, value, row.key)
    return base64.urlsafe_b64encode(_encoder.encode(cursor)).decode().rstrip("=")


def read_token(token: str, order: PrefixOrder, key_prefix: str) -> Cursor:
    """The place that a token names.

    Raises:
        RequestError: it is no token, or one of another list.
    """
    try:
        cursor = _decoder.decode(base64.urlsafe_b64decode(token.rstrip("=") + "=" * (-len(token.rstrip("=")) % 4)))
    except ValueError:  # of base64 and of msgspec alike
        cursor = None
    if cursor is None or not math.isfinite(cursor.value):
        raise RequestError(ErrorReason.INVALID_ARGUMENT, "is not a token of this server", field="page_token")
    if (cursor.order, cursor.key_prefix) != (order, key_prefix):
        raise RequestError(ErrorReason.INVALID_ARGUMENT, "is of a list with other settings", field="page_token")
    return cursor
