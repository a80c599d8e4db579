"""Requests that nobody would send, and what becomes of them: generators, a judge of answers, and the traffic itself."""
