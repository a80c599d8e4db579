"""Every metric family that /metrics serves: its name, type, labels and meaning. The page holds no other.

`python -m daemon.front.families` prints the table of ops/docs/observability.md.
"""

from dataclasses import dataclass
from enum import StrEnum


class Type(StrEnum):
    """As Prometheus has it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """One family. A counter's name ends in _total; a unit is the end of the name, before that."""

    name: str
    type: Type
    meaning: str
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert (self.type is Type.COUNTER) == self.name.endswith("_total"), self.name


def _counter(name: str, meaning: str, *labels: str) -> Family:
    return Family(name, Type.COUNTER, meaning, labels)


def _gauge(name: str, meaning: str, *labels: str) -> Family:
    return Family(name, Type.GAUGE, meaning, labels)


def _histogram(name: str, meaning: str, *labels: str) -> Family:
    return Family(name, Type.HISTOGRAM, meaning, labels)


TIERS = (
    _gauge("downcore_tier_capacity_bytes", "The most that a tier may hold", "tier"),
    _gauge("downcore_tier_used_bytes", "What it holds: cached, or held by sequences and transfers", "tier", "use"),
    _gauge("downcore_tier_medium_bytes", "What its medium has given up for it; of a disk what du says", "tier"),
    _gauge("downcore_tier_pinned_bytes", "Of the cached bytes, those that pins bind", "tier"),
    _gauge("downcore_tier_dirty_bytes", "On their way to the tier and not there yet", "tier"),
    _gauge("downcore_tier_blocks", "Blocks of the tier: free, cached or held", "tier", "use"),
    _gauge("downcore_tier_slots", "Slots for recurrent states: free or taken", "tier", "use"),
    _gauge("downcore_tier_state", "1 for the state that the tier is in: ok, read-only or degraded", "tier", "state"),
    _counter("downcore_tier_hit_tokens_total", "Prompt tokens that the tier gave, each counted in one tier", "tier"),
    _counter("downcore_tier_miss_tokens_total", "Prompt tokens that neither it nor a faster tier had", "tier"),
    _counter("downcore_tier_reads_total", "Records or images read from the tier to the device", "tier"),
    _counter("downcore_tier_read_bytes_total", "Their bytes, as they lie in the tier", "tier"),
    _histogram("downcore_tier_read_seconds", "Time of one read job, of up to 64 MiB of images", "tier"),
    _counter("downcore_tier_writes_total", "Records or images written to the tier", "tier"),
    _counter("downcore_tier_written_bytes_total", "Their bytes, as they lie in the tier", "tier"),
    _histogram("downcore_tier_write_seconds", "Time of one batch with its commit; of the lowest tier", "tier"),
    _counter("downcore_tier_dropped_writes_total", "Writes given up, because the medium failed or was full", "tier"),
    _counter(
        "downcore_tier_evictions_total",
        "What left the tier, a block or a checkpoint, and why: room, orphaned, damaged, asked, expired or quota",
        "tier", "kind", "reason",
    ),
    _counter("downcore_tier_verify_failures_total", "Records that did not check or could not be read", "tier"),
    _gauge("downcore_tier_quarantined_records", "Records set aside and not deleted yet", "tier"),
    _histogram("downcore_tier_stall_seconds", "How long a request stood aside for its prefix from the tier", "tier"),
    _counter("downcore_tier_late_loads_total", "Of those, the ones not waited for to their end", "tier"),
    _counter("downcore_tier_gate_refusals_total", "Hits not loaded because computing was faster", "tier"),
    _counter("downcore_tier_streamed_bytes_total", "Read for attention over blocks that stay in the tier", "tier"),
    _histogram("downcore_tier_block_lifetime_seconds", "From a block's arrival in the tier until it left", "tier"),
    _histogram(
        "downcore_tier_reuse_gap_seconds",
        "Since a prompt's beginning was last asked for, by the slowest tier that gave of it; none: it was gone",
        "tier",
    ),
    _gauge("downcore_tier_load_bytes_per_second", "Bandwidth that the gate expects of a load", "tier"),
    _gauge("downcore_tier_load_latency_seconds", "Latency that the gate expects of a load", "tier"),
    _counter("downcore_dropped_offers_total", "Prefixes not written down for want of room to remember them"),
    _gauge("downcore_namespace_cached_bytes", "Of the largest namespaces, where a setting asks for it", "namespace"),
)  # fmt: skip
REQUESTS = (
    _gauge("downcore_open_requests", "Generate calls that are open"),
    _gauge("downcore_open_warm_jobs", "Warming jobs that run"),
    _gauge("downcore_held_request_bytes", "Of open requests and jobs, as sent and as token ids"),
    _gauge("downcore_sequences", "Answers and warmed prompts in the engine, by state", "state"),
    _counter("downcore_prompt_tokens_total", "Of prompts that were computed, by where they came from", "source"),
    _counter("downcore_answer_tokens_total", "Tokens that the engine made"),
    _counter("downcore_answers_total", "Answers that ended: stop, length, aborted, cancelled or failed", "end"),
    _counter("downcore_errors_total", "Calls that ended with an error of the catalogue", "method", "reason"),
    _histogram("downcore_request_seconds", "From arrival to end, of requests that neither failed nor were cancelled"),
    _histogram("downcore_request_queue_seconds", "From arrival to admission, tokenizing included"),
    _histogram("downcore_request_prefill_seconds", "From admission until the prompt was computed"),
    _histogram("downcore_request_decode_seconds", "From the first token to the last"),
    _histogram("downcore_first_token_seconds", "From arrival to the first token"),
    _histogram("downcore_token_gap_seconds", "Between two tokens of one answer"),
    _histogram("downcore_request_prompt_tokens", "Length of prompts"),
    _histogram("downcore_request_answer_tokens", "Tokens of all answers of a request together"),
)
ENGINE = (
    _gauge("downcore_serving", "1 while the step clock turns and new work is taken"),
    _gauge("downcore_engine_up", "1 while an engine is ready and has answered this scrape"),
    _counter("downcore_engine_starts_total", "Engines started, the first included"),
    _gauge("downcore_engine_loaded_ratio", "Part of the weights that is read"),
    _gauge("downcore_pulse_age_seconds", "Since the engine's step clock was last heard"),
    _counter("downcore_steps_total", "Steps of this engine"),
    _histogram("downcore_step_seconds", "Time of a step with something to compute"),
    _histogram("downcore_step_decode_rows", "Rows of a step that decodes"),
    _histogram("downcore_lookup_seconds", "Time of looking a prompt up in all tiers"),
    _counter("downcore_preemptions_total", "Sequences that made room: moved to the host tier, or replayed", "how"),
    _counter("downcore_unbalanced_proofs_total", "Idle proofs that found something astray; the log says what"),
    _gauge("downcore_prefill_tokens_per_second", "Of the fastest whole chunk of late"),
    _counter("downcore_worker_kills_total", "Workers that took too long or died: tokenizers, grammars", "workers"),
    _gauge("downcore_info", "Always 1; what runs", "version", "model", "family", "dtype", "device"),
)
PROCESSES = (
    _gauge("downcore_process_resident_bytes", "Resident memory of front, engine, tokenizers and grammars", "process"),
    _gauge("downcore_process_open_fds", "Open files and sockets", "process"),
    _counter("downcore_process_cpu_seconds_total", "Processor time since the process began", "process"),
    _gauge("downcore_start_time_seconds", "When the front started, seconds since the epoch"),
)
_VLLM = ("model_name", "engine")
VLLM = (
    _gauge("vllm:num_requests_running", "Sequences that prefill or decode", *_VLLM),
    _gauge("vllm:num_requests_waiting", "Sequences that wait, preempted ones included", *_VLLM),
    _gauge("vllm:kv_cache_usage_perc", "Part of the device's blocks that sequences hold, from 0 to 1", *_VLLM),
    _counter("vllm:num_preemptions_total", "All of downcore_preemptions_total", *_VLLM),
    _counter("vllm:prompt_tokens_total", "All of downcore_prompt_tokens_total", *_VLLM),
    _counter("vllm:generation_tokens_total", "downcore_answer_tokens_total", *_VLLM),
    _counter("vllm:request_success_total", "Answers that ended: stop, length or abort", *_VLLM, "finished_reason"),
    _counter("vllm:prefix_cache_queries_total", "Prompt tokens looked up on the device", *_VLLM),
    _counter("vllm:prefix_cache_hits_total", "Prompt tokens that the device gave", *_VLLM),
    _counter("vllm:external_prefix_cache_queries_total", "Prompt tokens looked up in the tiers below", *_VLLM),
    _counter("vllm:external_prefix_cache_hits_total", "Prompt tokens that the tiers below gave", *_VLLM),
    _histogram("vllm:time_to_first_token_seconds", "downcore_first_token_seconds", *_VLLM),
    _histogram("vllm:inter_token_latency_seconds", "downcore_token_gap_seconds", *_VLLM),
    _histogram("vllm:time_per_output_token_seconds", "The same, under its older name", *_VLLM),
    _histogram("vllm:e2e_request_latency_seconds", "downcore_request_seconds", *_VLLM),
    _histogram("vllm:request_queue_time_seconds", "downcore_request_queue_seconds", *_VLLM),
    _histogram("vllm:request_prefill_time_seconds", "downcore_request_prefill_seconds", *_VLLM),
    _histogram("vllm:request_decode_time_seconds", "downcore_request_decode_seconds", *_VLLM),
)  # fmt: skip
FAMILIES = {family.name: family for family in (*TIERS, *REQUESTS, *ENGINE, *PROCESSES, *VLLM)}


def table() -> str:
    """All families as a Markdown table."""
    rows = [
        f"| `{family.name}` | {family.type} | {', '.join(family.labels)} | {family.meaning} |"
        for family in FAMILIES.values()
    ]
    return "\n".join(("| family | type | labels | meaning |", "|---|---|---|---|", *rows))


if __name__ == "__main__":
    print(table())
