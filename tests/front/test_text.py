"""Text from tokens: any cut of a text gives the same visible text, whole UTF-8, and no part of a stop string."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.front.text import StopMatcher, TextStream, TokenTable
from daemon.front.token_bytes import AddedToken, UnsupportedTokenizer, token_bytes

texts = st.text(alphabet="abcé€😀\n ", max_size=40)
stop_lists = st.lists(st.text(alphabet="abcé😀", min_size=1, max_size=5), min_size=1, max_size=4)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    """The data in pieces that end at the cuts."""
    edges = sorted({0, len(data), *(c % (len(data) + 1) for c in cuts)})
    return [data[a:b] for a, b in pairwise(edges)]


def shown(pieces: list[bytes], stops: list[str]) -> tuple[list[str], str | None]:
    """What became visible piece by piece, and the stop string that ended it."""
    stream = TextStream(stops)
    parts: list[str] = []
    for piece in pieces:
        parts.append(stream.add(piece))
        if stream.stop is not None:
            break
    parts.append(stream.finish())
    return parts, stream.stop


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By definition: the stop string completed first, the longest of those completed together."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(texts, stop_lists, st.lists(st.integers(0, 400), max_size=30))
def test_any_split_of_a_text_shows_the_same_and_ends_before_the_first_stop(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    parts, stop = shown(cut(text.encode(), cuts), stops)
    assert ("".join(parts), stop) == expected(text, stops)


@given(texts, stop_lists)
def test_nothing_is_shown_that_a_later_token_could_take_back(text: str, stops: list[str]) -> None:
    whole, _ = expected(text, stops)
    stream = TextStream(stops)
    so_far = ""
    for byte in text.encode():
        so_far += stream.add(bytes((byte,)))
        assert whole.startswith(so_far)
        if stream.stop is not None:
            break


@given(texts, st.lists(st.integers(0, 400), max_size=30))
def test_no_piece_ends_inside_a_utf8_sequence(text: str, cuts: list[int]) -> None:
    parts, _ = shown(cut(text.encode(), cuts), [])
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


@given(st.binary(max_size=30), st.lists(st.integers(0, 400), max_size=10))
def test_bytes_that_are_no_utf8_show_the_same_however_they_are_cut(data: bytes, cuts: list[int]) -> None:
    parts, _ = shown(cut(data, cuts), [])
    assert "".join(parts) == data.decode(errors="replace")


def test_a_stop_string_across_three_tokens_is_held_back_and_never_shown() -> None:
    stream = TextStream(["STOP"])
    assert [stream.add(piece) for piece in (b"go S", b"TO", b"P more")] == ["go ", "", ""]
    assert stream.stop == "STOP"
    assert stream.finish() == ""


def test_a_false_start_of_a_stop_string_is_shown_as_soon_as_it_is_false() -> None:
    stream = TextStream(["aab"])
    assert [stream.add(piece) for piece in (b"aa", b"a", b"c")] == ["", "a", "aac"]
    assert stream.stop is None


def test_text_that_may_not_stop_yet_is_shown_and_not_searched() -> None:
    stream = TextStream(["ab"])
    assert stream.add(b"ab", may_stop=False) == "ab"
    assert stream.add(b"ab") == ""
    assert stream.stop == "ab"


def test_a_cut_sequence_at_the_end_is_one_replacement_character() -> None:
    parts, _ = shown([b"a", "é".encode()[:1]], [])
    assert parts == ["a", "", "\ufffd"]


def test_ids_past_the_vocabulary_have_no_text() -> None:
    table = TokenTable([b"a"])
    assert (table[0], table[1], table[100_000]) == (b"a", b"", b"")


def test_byte_level_vocabularies_spell_every_byte() -> None:
    table = token_bytes({"Ġthe": 0, "Ċ": 1, "Ã©": 2, "<s>": 3}, {3: AddedToken("<s>", True)}, {"type": "ByteLevel"})
    assert table == [b" the", b"\n", "é".encode(), b""]


def test_metaspace_vocabularies_have_spaces_and_byte_tokens() -> None:
    decoder = {"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    added = {0: AddedToken("<s>", True), 4: AddedToken("<tool>", False)}
    table = token_bytes({"<s>": 0, "▁the": 1, "<0xE2>": 2, "x": 3, "<tool>": 4}, added, decoder)
    assert table == [b"", b" the", b"\xe2", b"x", b"<tool>"]


def test_an_unknown_kind_of_vocabulary_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedTokenizer, match="WordPiece"):
        token_bytes({"a": 0}, {}, {"type": "WordPiece"})


@given(
    st.lists(st.text(alphabet="ab\n<é", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.text(alphabet="ab\n<éx", max_size=5), max_size=12),
)
def test_skipping_to_where_a_stop_may_begin_skips_nothing_else(stops: list[str], pieces: list[str]) -> None:
    """The same as with a matcher that is fed every character, token by token."""
    stream, plain = TextStream(stops), StopMatcher(stops)
    shown = fed = ""
    for piece in pieces:
        shown += stream.add(piece.encode())
        stop = None
        for char in piece:
            stop = plain.feed(char)
            fed += char
            if stop is not None:
                break
        assert stream.stop == stop
        if stop is not None:
            assert shown == fed[: -len(stop)]
            return
        assert shown == fed[: len(fed) - plain.held_len]
