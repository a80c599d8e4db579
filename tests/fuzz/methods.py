"""Every method that the daemon serves, how often it is called, and sound requests of it, from which others are made."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from downcore.v1 import admin_pb2, cache_pb2  # pyright: ignore[reportUnusedImport] # registers them
from downcore.v1 import generation_pb2 as pb
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm  # pyright: ignore[reportMissingTypeStubs]

from daemon.front.access import ADMIN, CACHE, GENERATION, HEALTH, REFLECTION, VLLM_ENGINE

SERVICES = (GENERATION, CACHE, ADMIN, HEALTH, REFLECTION, VLLM_ENGINE)
WEIGHTS = {  # of calls; the rest have 1
    f"/{GENERATION}/Generate": 24,
    f"/{GENERATION}/Tokenize": 6,
    f"/{GENERATION}/Abort": 3,
    f"/{CACHE}/WarmPrefix": 8,
    f"/{CACHE}/LookupPrefix": 6,
    f"/{CACHE}/PinPrefix": 4,
    f"/{CACHE}/UnpinPrefix": 4,
    f"/{CACHE}/EvictPrefix": 4,
    f"/{CACHE}/ListPrefixes": 4,
    f"/{ADMIN}/FlushTier": 0.2,
    f"/{ADMIN}/VerifyTier": 0.2,
    f"/{VLLM_ENGINE}/Generate": 12,
    f"/{VLLM_ENGINE}/Abort": 3,
}
# Whose streams go on for ever.
ENDLESS = {
    f"/{ADMIN}/WatchTiers", f"/{ADMIN}/WatchEvents", f"/{HEALTH}/Watch", f"/{VLLM_ENGINE}/SubscribeKvEvents",
}  # fmt: skip
DRAIN = f"/{ADMIN}/Drain"  # what it does cannot be undone: it has a daemon of its own


@dataclass(frozen=True, slots=True)
class Method:
    """One method, the type of its requests and of its answers, and some sound requests."""

    path: str
    request: type[Message]
    response: type[Message]
    is_stream: bool  # of answers
    is_request_stream: bool
    weight: float
    sound: tuple[Message, ...]

    @property
    def is_endless(self) -> bool:
        return self.path in ENDLESS


def all_methods() -> list[Method]:
    """From the descriptors, so that none is left out."""
    found: list[Method] = []
    for name in SERVICES:
        service: Any = descriptor_pool.Default().FindServiceByName(name)
        for method in service.methods:
            path = f"/{name}/{method.name}"
            request: type[Message] = message_factory.GetMessageClass(method.input_type)
            response: type[Message] = message_factory.GetMessageClass(method.output_type)
            found.append(
                Method(
                    path, request, response, method.server_streaming, method.client_streaming,
                    WEIGHTS.get(path, 1.0), SOUND.get(path, (request(),)),
                )
            )  # fmt: skip
    return found


IDS = pb.TokenIds(ids=[5 + i % 90 for i in range(130)])
TEXT = "a prompt that is long enough to have a prefix of its own, which is one chunk of the grid and a little more" * 2
CHAT = pb.Chat(messages=[pb.ChatMessage(role="user", content="hello"), pb.ChatMessage(role="assistant", content="hi")])
PROMPT = cache_pb2.Prompt(token_ids=IDS)
SELECTED = cache_pb2.PrefixSelector(prompt=PROMPT)
STOPPING = pb.StoppingParams(max_tokens=3, min_tokens=1, stop=["zz", "\n\n"], stop_token_ids=[7], ignore_eos=True)
SAMPLING = pb.SamplingParams(
    temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, typical_p=0.95, repetition_penalty=1.1, presence_penalty=0.5,
    frequency_penalty=0.5, logit_bias={5: 1.0, 9: -100.0}, seed=3, logprobs=True, top_logprobs=3,
)  # fmt: skip
SOUND: Mapping[str, tuple[Message, ...]] = {
    f"/{GENERATION}/Generate": (
        pb.GenerateRequest(request_id="a", token_ids=IDS, sampling=SAMPLING, stopping=STOPPING, n=2),
        pb.GenerateRequest(text=TEXT, stopping=STOPPING),
        pb.GenerateRequest(chat=CHAT, stopping=STOPPING, namespace="default/part"),
        pb.GenerateRequest(
            text="{", stopping=STOPPING, structured_output=pb.StructuredOutput(json_schema='{"type":"object"}')
        ),
        pb.GenerateRequest(
            text="{", structured_output=pb.StructuredOutput(choice=pb.Choices(values=["yes", "no"])), stopping=STOPPING
        ),
        pb.GenerateRequest(text="x", stopping=STOPPING, structured_output=pb.StructuredOutput(regex="[a-c]{3}")),
    ),
    f"/{GENERATION}/Tokenize": (pb.TokenizeRequest(text=TEXT), pb.TokenizeRequest(chat=CHAT)),
    f"/{GENERATION}/Abort": (pb.AbortRequest(request_id="a"),),
    f"/{CACHE}/WarmPrefix": (
        cache_pb2.WarmPrefixRequest(key="job", prompts=[PROMPT], pin=True, ttl_s=1.0),
        cache_pb2.WarmPrefixRequest(prompts=[cache_pb2.Prompt(text=TEXT)] * 2, tier=cache_pb2.CACHE_TIER_HOST),
        cache_pb2.WarmPrefixRequest(
            key="kept", prompts=[PROMPT], tier=cache_pb2.CACHE_TIER_DISK, durable=True, detached=True, ttl_s=5.0
        ),
    ),
    f"/{CACHE}/LookupPrefix": (cache_pb2.LookupPrefixRequest(prompt=PROMPT, namespace="default"),),
    f"/{CACHE}/PinPrefix": (cache_pb2.PinPrefixRequest(prefix=SELECTED, ttl_s=0.5),),
    f"/{CACHE}/UnpinPrefix": (cache_pb2.UnpinPrefixRequest(prefix=SELECTED),),
    f"/{CACHE}/EvictPrefix": (cache_pb2.EvictPrefixRequest(prefix=SELECTED),),
    f"/{CACHE}/ListPrefixes": (
        cache_pb2.ListPrefixesRequest(page_size=3, key_prefix="a", order=cache_pb2.PREFIX_ORDER_BYTES),
    ),
    f"/{ADMIN}/WatchTiers": (admin_pb2.WatchTiersRequest(interval_s=0.1),),
    f"/{ADMIN}/ListSequences": (admin_pb2.ListSequencesRequest(id="a/0"),),
    f"/{ADMIN}/AbortSequence": (admin_pb2.AbortSequenceRequest(id="a/1", namespace="default"),),
    f"/{ADMIN}/FlushTier": (admin_pb2.FlushTierRequest(tier=cache_pb2.CACHE_TIER_HOST),),
    f"/{ADMIN}/VerifyTier": (admin_pb2.VerifyTierRequest(tier=cache_pb2.CACHE_TIER_DISK),),
    f"/{ADMIN}/SetQuota": (
        admin_pb2.SetQuotaRequest(namespace="default/part", cached_bytes=1 << 20, pinned_bytes=1 << 19),
    ),
    f"/{ADMIN}/RemoveQuota": (admin_pb2.RemoveQuotaRequest(namespace="default/part"),),
    f"/{ADMIN}/WatchEvents": (
        admin_pb2.WatchEventsRequest(after_sequence=2, log_id="ab", follow=True, kinds=[admin_pb2.EVENT_KIND_SERVING]),
    ),
    f"/{HEALTH}/Check": (health_pb2.HealthCheckRequest(service=GENERATION),),
    f"/{HEALTH}/Watch": (health_pb2.HealthCheckRequest(service=""),),
    f"/{REFLECTION}/ServerReflectionInfo": (
        reflection_pb2.ServerReflectionRequest(host="h", file_containing_symbol=GENERATION),
        reflection_pb2.ServerReflectionRequest(file_by_filename="downcore/v1/cache.proto"),
        reflection_pb2.ServerReflectionRequest(
            file_containing_extension=reflection_pb2.ExtensionRequest(
                containing_type="google.protobuf.MessageOptions", extension_number=72295728
            )
        ),
        reflection_pb2.ServerReflectionRequest(list_services=""),
    ),
    f"/{VLLM_ENGINE}/Generate": (
        vllm.GenerateRequest(
            request_id="v",
            tokenized=vllm.TokenizedInput(original_text="x", input_ids=IDS.ids),
            sampling_params=vllm.SamplingParams(
                temperature=0.5, top_p=0.9, top_k=9, max_tokens=3, stop=["zz"], n=2, logprobs=2, seed=-4,
                logit_bias={5: 2.0},
            ),
            stream=True,
        ),
        vllm.GenerateRequest(text="hello", sampling_params=vllm.SamplingParams(max_tokens=2)),
    ),
    f"/{VLLM_ENGINE}/Abort": (vllm.AbortRequest(request_ids=["v", "a"]),),
}  # fmt: skip
