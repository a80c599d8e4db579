"""Prompts as requests carry them, and the token ids that the engine takes. Generation and cache read them alike.

Any message with a oneof `prompt` of text, chat and token ids is a prompt.
"""

import array
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from downcore.v1 import cache_pb2, generation_pb2

from daemon.errors import ErrorReason, RequestError
from daemon.front import tokenizer_messages as tm
from daemon.front import validate
from daemon.front.config import FrontConfig
from daemon.front.grammars import Grammars
from daemon.front.supervisor import Supervisor
from daemon.front.tokenizer_pool import TokenizerPool

HasPrompt = generation_pb2.GenerateRequest | generation_pb2.TokenizeRequest | cache_pb2.Prompt
ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request's texts as the engine takes them: little-endian int32 token ids, and the grammar that was asked for."""

    prompt_ids: bytes
    grammar: str | None = None

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids) // ID_BYTES


class Prompts:
    """Checks prompts and structures against the served model's limits, and tokenizes the one, parses the other."""

    def __init__(
        self, config: FrontConfig, supervisor: Supervisor, tokenizers: TokenizerPool, grammars: Grammars
    ) -> None:
        self._config = config
        self._supervisor = supervisor
        self._tokenizers = tokenizers
        self._grammars = grammars

    def limits(self) -> validate.Limits:
        """What this server and its model take. Raises RequestError while no engine is ready."""
        info = self._supervisor.require_ready()
        return validate.Limits(
            vocab_size=info.vocab_size,
            max_context_tokens=info.max_context_tokens,
            max_answer_tokens=self._config.max_tokens_limit or info.max_context_tokens,
            max_prompt_bytes=self._config.max_prompt_bytes,
        )

    async def prepare(self, request: generation_pb2.GenerateRequest, namespace: str) -> Prepared:
        """All that has to be done outside the engine before it gets a checked request.

        Raises:
            RequestError: as `encode`; or the structure is wrong, or too costly to follow.
        """
        grammar: str | None = None
        if request.HasField("structured_output"):
            info = self._supervisor.require_ready()
            grammar = await self._grammars.check(request.structured_output, namespace, info.eos_token_ids)
        return Prepared(await self.encode(request), grammar)

    async def encode(self, message: HasPrompt, within: str = "") -> bytes:
        """Token ids of a checked prompt, little-endian int32.

        Args:
            within: the dotted name of the field that holds the message, for errors to name.

        Raises:
            RequestError: the tokenizers are too busy, took too long, or have no answer for this prompt.
        """
        match message.WhichOneof("prompt"):
            case "text":
                return await self._tokenizers.encode(tm.EncodeText(message.text), validate.dotted(within, "text"))
            case "chat":
                turns = tuple(tm.Turn(turn.role, turn.content) for turn in message.chat.messages)
                # A template adds a few words to each message.
                question = tm.EncodeChat(turns, 2 * self._config.max_prompt_bytes)
                return await self._tokenizers.encode(question, validate.dotted(within, "chat"))
            case _:
                assert not isinstance(message, generation_pb2.TokenizeRequest)
                return to_little_endian(message.token_ids.ids)

    async def encode_whole(self, message: cache_pb2.Prompt, within: str) -> bytes:
        """As `encode`, of a prompt that must have a token and fit the context."""
        ids = await self.encode(message, within)
        num_tokens = len(ids) // ID_BYTES
        longest = self._supervisor.require_ready().max_context_tokens - 1
        if num_tokens == 0:
            raise RequestError(ErrorReason.INVALID_ARGUMENT, "has no token", field=within)
        if num_tokens > longest:
            text = f"has {num_tokens} tokens; the context takes {longest} and an answer"
            raise RequestError(ErrorReason.CONTEXT_TOO_LONG, text, field=within)
        return ids


def to_little_endian(ids: Iterable[int]) -> bytes:
    """Token ids as the engine reads them: int32."""
    values = array.array("i", ids)
    assert values.itemsize == ID_BYTES
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def from_little_endian(ids: bytes) -> "array.array[int]":
    """The ids again."""
    values = array.array("i")
    values.frombytes(ids)
    if sys.byteorder == "big":
        values.byteswap()
    return values
