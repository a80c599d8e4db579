"""A client of the gateway's service, as a gateway would call it."""

from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc


class Client:
    """Its calls on one channel."""

    def __init__(self, channel: grpc.Channel, token: str | None = None) -> None:
        self.stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        self.metadata = (("authorization", f"Bearer {token}"),) if token is not None else ()

    def stream(self, ids: list[int], *, stream: bool = True, request_id: str = "", **sampling: Any) -> Any:
        request = vllm.GenerateRequest(
            request_id=request_id,
            tokenized=vllm.TokenizedInput(input_ids=ids),
            sampling_params=vllm.SamplingParams(**sampling),
            stream=stream,
        )
        return self.stub.Generate(request, timeout=60, metadata=self.metadata)

    def generate(self, ids: list[int], **fields: Any) -> list[vllm.GenerateResponse]:
        """The whole stream."""
        return list(self.stream(ids, **fields))

    def call(self, name: str, **fields: Any) -> Any:
        """A method of which nothing but the fields of its request matters."""
        service = vllm.DESCRIPTOR.services_by_name["VllmEngine"]
        described: Any = service.methods_by_name[name].input_type
        module = vllm if described.full_name.startswith("vllm.") else common
        request = getattr(module, described.name)(**fields)
        return getattr(self.stub, name)(request, timeout=20, metadata=self.metadata)

    def subscribe(self, after: int = 0) -> Any:
        request = common.SubscribeKvEventsRequest(start_sequence_number=after)
        return self.stub.SubscribeKvEvents(request, timeout=60, metadata=self.metadata)
