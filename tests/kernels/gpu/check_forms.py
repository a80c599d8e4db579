"""Triton's forms through the interfaces that layers use, beside torch's forms on the same inputs."""

import torch

from kernels.dispatch import TORCH, AttentionSizes, choose_kernels
from kernels.key_tiles import Span
from kernels.paged_attention import GatedQueries, PagedRows
from kernels.triton_activate import gate_heads
from kernels.triton_forms import TRITON
from tests.kernels.gpu.paged import DEVICE, make_pages, pool, randn, relative_error, shuffled_tables, write_rows

BLOCK = 16
FORMS = (TORCH.attention, TRITON.attention)


def finish(steps):
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


def test_a_mixed_batch_equals_the_torch_form():
    lengths, counts = [45, 9, 33, 20], [20, 1, 33, 3]
    pages = make_pages(lengths, 2, 64, block_size=BLOCK, dtype=torch.bfloat16, seed=1)
    cu_rows = (0, 20, 21, 54, 57)
    tables = pages.tables.clamp(max=pages.k_plane.shape[0] - 1).long()
    rows = PagedRows(tables, tuple(n - c for n, c in zip(lengths, counts, strict=True)), cu_rows)
    sizes = AttentionSizes(BLOCK, 64, torch.bfloat16, 64)
    q = randn(57, 4, 64, seed=2)
    outs = [finish(form.attend(q, pages.k_plane, pages.v_plane, form.plan(rows, sizes), 0.125)) for form in FORMS]
    assert relative_error(outs[1], outs[0]) < 8e-3
    decode = PagedRows(tables, tuple(n - 1 for n in lengths), (0, 1, 2, 3, 4))
    outs = [finish(form.attend(q[:4], pages.k_plane, pages.v_plane, form.plan(decode, sizes), 0.125)) for form in FORMS]
    assert relative_error(outs[1], outs[0]) < 8e-3


def test_a_gate_is_the_last_factor_and_a_step_takes_it_along_to_the_byte():
    lengths = [45, 9, 33]
    pages = make_pages(lengths, 2, 64, block_size=BLOCK, dtype=torch.bfloat16, seed=11)
    tables = pages.tables.clamp(max=pages.k_plane.shape[0] - 1).long()
    sizes = AttentionSizes(BLOCK, 64, torch.bfloat16, 64)
    for counts in ([1, 1, 1], [20, 1, 33]):
        starts, last = tuple(n - c for n, c in zip(lengths, counts, strict=True)), sum(counts)
        rows = PagedRows(tables, starts, (0, counts[0], counts[0] + counts[1], last))
        q, gate = randn(last, 4, 64, seed=12), randn(last, 10, 64, seed=13)[:, 1:8:2]
        outs = [
            finish(
                form.attend_gated(GatedQueries(q, gate), pages.k_plane, pages.v_plane, form.plan(rows, sizes), 0.125)
            )
            for form in FORMS
        ]
        assert relative_error(outs[1], outs[0]) < 8e-3
        plan = TRITON.attention.plan(rows, sizes)
        bare = finish(TRITON.attention.attend(q, pages.k_plane, pages.v_plane, plan, 0.125))
        assert torch.equal(outs[1], gate_heads(bare, gate))


def test_latent_rows_select_and_attend_as_the_torch_forms_do():
    length, pool_tokens = 70, 4
    latents, index_keys = (pool(8, [shape], torch.bfloat16)[0] for shape in ((BLOCK, 48), (BLOCK // pool_tokens, 32)))
    table = shuffled_tables([length], BLOCK, 8, seed=3)[0].clamp(max=7).long()
    write_rows(latents, table, randn(length, 48, seed=4))
    write_rows(index_keys, table, randn(length // pool_tokens, 32, seed=5))
    for num_rows in (1, 11):
        span = Span(length - num_rows, table, 64)
        q = randn(num_rows, 4, 48, seed=6)
        outs = [form.latent(q, latents, span, latent_dim=32, scale=0.1) for form in FORMS]
        assert relative_error(outs[1], outs[0]) < 8e-3
        index_q, weights = randn(num_rows, 4, 32, seed=7), randn(num_rows, 4, seed=8, dtype=torch.float32)
        picked = [form.select_keys(index_q, weights, index_keys, span, pool=pool_tokens, count=5) for form in FORMS]
        assert torch.equal(picked[0].picks, picked[1].picks)
        outs = [form.sparse_latent(q, latents, span, picked[0], latent_dim=32, scale=0.1) for form in FORMS]
        assert relative_error(outs[1], outs[0]) < 8e-3


def test_a_step_of_many_sequences_equals_each_by_itself():
    lengths, pool_tokens = [70, 1, 41, 24], 4
    latents, index_keys = (pool(16, [shape], torch.bfloat16)[0] for shape in ((BLOCK, 48), (BLOCK // pool_tokens, 32)))
    tables = shuffled_tables(lengths, BLOCK, 15, seed=21).clamp(max=15).long()
    for s, length in enumerate(lengths):
        write_rows(latents, tables[s], randn(length, 48, seed=22 + s))
        write_rows(index_keys, tables[s], randn(length // pool_tokens, 32, seed=32 + s))
    # As of a step to be replayed: the host knows no more than what there is room for.
    positions = torch.tensor([n - 1 for n in lengths], device=DEVICE)
    most = tables.shape[1] * BLOCK - 1
    form = FORMS[1]
    batch = form.span_batch(PagedRows(tables, (most,) * 4, (0, 1, 2, 3, 4), positions), BLOCK)
    assert batch is not None
    q, index_q = randn(4, 4, 48, seed=42), randn(4, 4, 32, seed=43)
    weights = randn(4, 4, seed=44, dtype=torch.float32)
    dense = form.latent(q, latents, batch, latent_dim=32, scale=0.1)
    picked = form.select_keys(index_q, weights, index_keys, batch, pool=pool_tokens, count=5)
    sparse = form.sparse_latent(q, latents, batch, picked, latent_dim=32, scale=0.1)
    for s, length in enumerate(lengths):
        row, span = slice(s, s + 1), Span(length - 1, tables[s], 64)
        assert torch.equal(form.latent(q[row], latents, span, latent_dim=32, scale=0.1), dense[row])
        alone = form.select_keys(index_q[row], weights[row], index_keys, span, pool=pool_tokens, count=5)
        assert torch.equal(alone.picks, picked.picks[row])
        assert torch.equal(form.sparse_latent(q[row], latents, span, alone, latent_dim=32, scale=0.1), sparse[row])


def test_selected_heads_equal_the_torch_form():
    pages = make_pages([50], 1, 64, block_size=BLOCK, dtype=torch.bfloat16, seed=9)
    index_keys = pool(pages.k_plane.shape[0], [(BLOCK, 32)], torch.bfloat16)[0]
    table = pages.tables[0].clamp(max=pages.k_plane.shape[0] - 1).long()
    write_rows(index_keys, table, randn(50, 32, seed=10))
    span = Span(41, table, 64)
    index_q, weights = randn(9, 2, 32, seed=11), torch.ones(9, 2, device=DEVICE)
    selection = FORMS[1].select_keys(index_q, weights, index_keys, span, pool=1, count=12)
    q = randn(9, 2, 64, seed=12)
    outs = [form.sparse(q, pages.k_plane, pages.v_plane, span, selection, scale=0.125) for form in FORMS]
    assert relative_error(outs[1], outs[0]) < 8e-3


def test_before_the_first_pool_nothing_is_selected():
    index_keys = pool(1, [(BLOCK // 4, 32)], torch.bfloat16)[0]
    span = Span(0, torch.zeros(1, dtype=torch.int64, device=DEVICE), 64)
    args = (randn(3, 2, 32, seed=13), torch.ones(3, 2, device=DEVICE), index_keys, span)
    assert (FORMS[1].select_keys(*args, pool=4, count=5).picks == -1).all()


def test_the_form_follows_the_device_and_the_dtype():
    assert choose_kernels(torch.device("cpu"), torch.bfloat16) is TORCH
    assert choose_kernels(torch.device("cuda"), torch.float32) is TORCH
    assert choose_kernels(torch.device("cuda"), torch.bfloat16) is TRITON
