"""`vllm.grpc.engine.VllmEngine`, the service that gateways speak: translations only, into the front's own words."""
