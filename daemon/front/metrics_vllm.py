"""The same figures under vLLM's names, for dashboards, routers and scalers that look for those.

Their meaning is vLLM's: a sequence is what it calls a request, cached blocks that nothing holds are no usage, prefix
queries and hits are counted in tokens, and what lies below the device is its external cache.
"""

from collections.abc import Sequence

from daemon import messages
from daemon.cache_messages import TierName
from daemon.front.ended import End
from daemon.front.metrics import RequestMeters
from daemon.front.metrics_page import Page
from daemon.meter_messages import Meters

PADDING_BLOCKS = 1  # of the device, which nobody has
FINISHED = {"stop": (End.STOP,), "length": (End.LENGTH,), "abort": (End.ABORTED, End.CANCELLED)}


def add_requests(page: Page, requests: RequestMeters, model: str) -> None:
    """Those that the front counts."""
    labels = {"model_name": model, "engine": "0"}
    page.add("vllm:prompt_tokens_total", requests.prompt_tokens, **labels)
    page.add("vllm:generation_tokens_total", requests.answer_tokens, **labels)
    for reason, ends in FINISHED.items():
        count = sum(requests.ends[end] for end in ends)
        page.add("vllm:request_success_total", count, finished_reason=reason, **labels)
    for name, histogram in (
        ("vllm:time_to_first_token_seconds", requests.first_token_s),
        ("vllm:inter_token_latency_seconds", requests.token_gap_s),
        ("vllm:time_per_output_token_seconds", requests.token_gap_s),
        ("vllm:e2e_request_latency_seconds", requests.request_s),
        ("vllm:request_queue_time_seconds", requests.queue_s),
        ("vllm:request_prefill_time_seconds", requests.prefill_s),
        ("vllm:request_decode_time_seconds", requests.decode_s),
    ):
        page.add_histogram(name, histogram, **labels)


def add_engine(page: Page, rows: Sequence[messages.TierRow], meters: Meters, model: str) -> None:
    """Those that the engine counts."""
    labels = {"model_name": model, "engine": "0"}
    states = meters.sequences
    running = states.get("prefilling", 0) + states.get("decoding", 0)
    page.add("vllm:num_requests_running", running, **labels)
    page.add("vllm:num_requests_waiting", sum(states.values()) - running, **labels)
    page.add("vllm:num_preemptions_total", meters.moved_preemptions + meters.replayed_preemptions, **labels)
    device = next(row for row in rows if row.name == TierName.DEVICE)
    num_blocks = device.blocks - PADDING_BLOCKS
    num_held = num_blocks - device.free_blocks - device.cached_blocks
    page.add("vllm:kv_cache_usage_perc", num_held / num_blocks, **labels)
    on_device = sum(tier.hit_tokens for tier in meters.tiers if tier.tier is TierName.DEVICE)
    below = sum(tier.hit_tokens for tier in meters.tiers if tier.tier is not TierName.DEVICE)
    page.add("vllm:prefix_cache_queries_total", on_device + below + meters.computed_tokens, **labels)
    page.add("vllm:prefix_cache_hits_total", on_device, **labels)
    if len(meters.tiers) > 1:
        page.add("vllm:external_prefix_cache_queries_total", below + meters.computed_tokens, **labels)
        page.add("vllm:external_prefix_cache_hits_total", below, **labels)
