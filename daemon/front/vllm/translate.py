"""A gateway's Generate call in the words of downcore.v1, and the answer's stream in the gateway's.

Every field of the gateway's request is here: translated, or refused by name where it asks for something that this
daemon does not do, or left alone where it says how ids become text, which the gateway does itself.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from downcore.v1 import generation_pb2 as pb
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm  # pyright: ignore[reportMissingTypeStubs]

from daemon.errors import ErrorReason, RequestError
from daemon.front.validate import MAX_BIASES

MAX_UNKNOWN_BYTES = 64 << 10  # of a message whose unknown fields are listed: millions fit into the largest
SEED_MASK = (1 << 63) - 1  # a gateway's seed may be negative; any two differ all the same
FINISH_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORTED: "abort",
}
# What asks for something that is not done here, and why not.
_NO_HANDOFF = "blocks are not handed from one daemon to another"
_TEXT_ONLY = "this daemon takes text alone"
_REFUSED_IN_REQUEST = {
    "kv_transfer_params": _NO_HANDOFF,
    "kv_transfer_params_json": _NO_HANDOFF,
    "mm_inputs": _TEXT_ONLY,
    "extra_mm_inputs": _TEXT_ONLY,
    "media_refs": _TEXT_ONLY,
}
_REFUSED_IN_SAMPLING = {
    "prompt_logprobs": "log-probabilities of the prompt are not computed",
    "truncate_prompt_tokens": "prompts are never cut: send what is meant",
    "structural_tag": "there is no such structure here; a grammar as Lark writes it may say the same",
}
# Fields that say how ids become text (skip_special_tokens, spaces_between_special_tokens, include_stop_str_in_output,
# tokenized.original_text) or where a grammar begins (grammar_from_first_token) change no id, and are the gateway's.
_DEFAULT_AT_ZERO = ("top_p", "repetition_penalty")  # there is no other way to leave them out
_PLAIN = ("top_k", "min_p", "frequency_penalty", "presence_penalty")  # whose default is zero
# Where a field of downcore.v1 has another name there; the rest of these three is in `sampling_params`.
_NAMES = {
    "prompt": "input",
    "token_ids": "tokenized.input_ids",
    "token_ids.ids": "tokenized.input_ids",
    "n": "sampling_params.n",
    "sampling.top_logprobs": "sampling_params.logprobs",
    "structured_output": "sampling_params",
    "structured_output.choice.values": "sampling_params.choice.choices",
}


def to_generate(request: vllm.GenerateRequest) -> pb.GenerateRequest:
    """The same request for GenerationService, which checks its values.

    Raises:
        RequestError: it has a field that is unknown here, or asks for what is not done.
    """
    given = request.sampling_params
    _refuse(request, "", _REFUSED_IN_REQUEST)
    _refuse(given, "sampling_params.", _REFUSED_IN_SAMPLING)
    if request.HasField("data_parallel_rank") and request.data_parallel_rank != 0:
        raise _wrong("data_parallel_rank", "this daemon has rank 0 alone")
    if given.HasField("logprobs") and given.logprobs < 0:
        raise _wrong("sampling_params.logprobs", "the whole vocabulary's are not sent")
    if len(given.logit_bias) > MAX_BIASES:  # before they are copied
        message = f"has {len(given.logit_bias)} entries, at most {MAX_BIASES} are allowed"
        raise _wrong("sampling_params.logit_bias", message)
    if any(token_id < 0 for token_id in given.logit_bias):
        raise _wrong("sampling_params.logit_bias", "a token id is negative")
    stopping = pb.StoppingParams(
        max_tokens=given.max_tokens if given.HasField("max_tokens") else None,
        min_tokens=given.min_tokens,
        stop=given.stop,
        stop_token_ids=given.stop_token_ids,
        ignore_eos=given.ignore_eos,
    )
    translated = pb.GenerateRequest(
        request_id=request.request_id,
        sampling=_sampling(given),
        stopping=stopping,
        n=given.n or None,
        structured_output=_structure(given),
    )
    match request.WhichOneof("input"):
        case "tokenized":
            translated.token_ids.ids.extend(request.tokenized.input_ids)
        case "text":
            translated.text = request.text
        case _:
            pass  # and GenerationService says that there is no prompt
    return translated


def _sampling(given: vllm.SamplingParams) -> pb.SamplingParams:
    sampling = pb.SamplingParams(logit_bias=dict(given.logit_bias))
    if given.HasField("temperature"):
        sampling.temperature = given.temperature
    for name in _DEFAULT_AT_ZERO:
        if getattr(given, name) != 0:
            setattr(sampling, name, getattr(given, name))
    for name in _PLAIN:
        setattr(sampling, name, getattr(given, name))
    if given.HasField("seed"):
        sampling.seed = given.seed & SEED_MASK
    if given.HasField("logprobs"):
        sampling.logprobs = True
        sampling.top_logprobs = given.logprobs
    return sampling


def _structure(given: vllm.SamplingParams) -> pb.StructuredOutput | None:
    match given.WhichOneof("constraint"):
        case "json_schema":
            return pb.StructuredOutput(json_schema=given.json_schema)
        case "regex":
            return pb.StructuredOutput(regex=given.regex)
        case "grammar":
            return pb.StructuredOutput(grammar=given.grammar)
        case "choice":
            return pb.StructuredOutput(choice=pb.Choices(values=given.choice.choices))
        case "json_object" if given.json_object:
            return pb.StructuredOutput(json_object=pb.JsonObject())
        case _:
            return None


def renamed(error: RequestError) -> RequestError:
    """An error of GenerationService, whose field has the name that the gateway knows."""
    name = error.field
    section, dot, rest = name.partition(".")
    if name in _NAMES:
        name = _NAMES[name]
    elif dot and section in ("sampling", "stopping", "structured_output"):
        name = f"sampling_params.{rest}"
    return RequestError(error.reason, error.message, field=name, retry_after_s=error.retry_after_s)


def _refuse(message: Message, prefix: str, refused: dict[str, str]) -> None:
    size = message.ByteSize()
    if size > MAX_UNKNOWN_BYTES:
        message.DiscardUnknownFields()
        if message.ByteSize() < size:
            raise _wrong(prefix.rstrip("."), "has fields whose numbers are not known here")
    for unknown in UnknownFieldSet(message):
        raise _wrong(f"{prefix}{unknown.field_number}", "no field of this number is known here")
    for descriptor, _ in message.ListFields():
        if descriptor.name in refused:
            raise _wrong(f"{prefix}{descriptor.name}", refused[descriptor.name])


def _wrong(field_name: str, why: str) -> RequestError:
    return RequestError(ErrorReason.INVALID_ARGUMENT, why, field=field_name)


@dataclass(slots=True)
class _Made:
    """What one choice has made so far; ids and log-probabilities are kept where they are sent at the end alone."""

    num_tokens: int = 0
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[pb.PositionLogprobs] = field(default_factory=list["pb.PositionLogprobs"])


class Answer:
    """One call's stream on its way to the gateway.

    With `is_stream` each chunk goes out as its tokens alone, and each choice's end without tokens; else each choice
    goes out once, whole. An end token or stop id is the last of a choice's tokens, as at other engines.
    """

    def __init__(self, *, is_stream: bool, eos_token_ids: tuple[int, ...]) -> None:
        self.is_stream = is_stream
        self._eos_token_ids = eos_token_ids
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._made: dict[int, _Made] = {}

    def take(self, response: pb.GenerateResponse) -> vllm.GenerateResponse | None:
        """The gateway's message for one of ours; None where it needs none."""
        match response.WhichOneof("event"):
            case "started":
                cached = response.started.cached_tokens
                self._prompt_tokens = response.started.prompt_tokens
                self._cached_tokens = cached.device + cached.host + cached.disk
                return None
            case "chunk":
                return self._chunk(response.chunk)
            case "finished":
                return self._complete(response.finished)
            case _:
                return None

    def _chunk(self, chunk: pb.GenerateChunk) -> vllm.GenerateResponse | None:
        made = self._made.setdefault(chunk.index, _Made())
        made.num_tokens += len(chunk.token_ids)
        if not self.is_stream:
            made.ids.extend(chunk.token_ids)
            made.logprobs.extend(chunk.logprobs)
            return None
        if not chunk.token_ids:  # the rest of a text, which the gateway makes of the ids
            return None
        return vllm.GenerateResponse(
            chunk=vllm.GenerateStreamChunk(
                token_ids=chunk.token_ids,
                prompt_tokens=self._prompt_tokens,
                completion_tokens=len(chunk.token_ids),
                cached_tokens=self._cached_tokens,
                output_logprobs=_logprobs(chunk.logprobs),
                index=chunk.index,
            )
        )

    def _complete(self, finished: pb.GenerateFinished) -> vllm.GenerateResponse:
        made = self._made.pop(finished.index, _Made())
        complete = vllm.GenerateComplete(
            output_ids=made.ids,
            finish_reason=FINISH_REASONS[finished.reason],
            prompt_tokens=self._prompt_tokens,
            completion_tokens=made.num_tokens,
            cached_tokens=self._cached_tokens,
            output_logprobs=_logprobs(made.logprobs),
            index=finished.index,
        )
        match finished.WhichOneof("stopped_by"):
            case "stop_string":
                complete.matched_stop_str = finished.stop_string
            case "stop_token_id" if finished.stop_token_id not in self._eos_token_ids:
                complete.matched_token_id = finished.stop_token_id
            case _:
                pass  # the model's own end is not a stop that matched
        return vllm.GenerateResponse(complete=complete)


class AnswerContext:
    """A call's context that puts what GenerationService writes into the gateway's words."""

    def __init__(self, context: Any, answer: Answer) -> None:
        self._context = context
        self._answer = answer
        self._write: Callable[[Message], Any] = context.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, response: pb.GenerateResponse | bytes) -> None:
        """Takes a message as GenerationService writes it, or its bytes.

        Raises:
            RequestError: it is kept for the end, and open requests hold too much together.
        """
        if isinstance(response, bytes):
            if not self._answer.is_stream:
                self._context.held.add(len(response))
            response = pb.GenerateResponse.FromString(response)
        message = self._answer.take(response)
        if message is not None:
            await self._write(message)


def _logprobs(positions: "list[pb.PositionLogprobs] | Any") -> vllm.OutputLogProbs | None:
    """Of each token, and as many of the most probable ones as were asked for."""
    if not positions:
        return None
    top = [
        vllm.TopLogProbs(values=[one.logprob for one in position.top], token_ids=[one.token_id for one in position.top])
        for position in positions
    ]
    return vllm.OutputLogProbs(
        token_logprobs=[position.chosen.logprob for position in positions],
        token_ids=[position.chosen.token_id for position in positions],
        top_logprobs=top if any(position.top for position in positions) else (),
    )
