"""Where the recurrent state of a prompt is worth keeping.

After Marconi (MLSys 2025, arXiv 2411.19379, section 4.1): a state is as large as thousands of tokens of history, and
most grid positions are never resumed at. Two kinds are: where paths part, because what was shared once is shared again,
and where a prompt ends, because a conversation goes on from there. A prompt that is longer than a tier can hold has a
third, once its beginning is known: the longest prefix that fits, where its next turns resume instead of nowhere. (What
is seen for the first time and does not fit keeps nothing, and pushes nothing out.) Attention needs none of this; its
history can be resumed at every grid position.
"""

from collections.abc import Iterable


def checkpoint_positions(
    prompt_len: int, *, grid: int, resume_len: int, branch_len: int | None, asked: Iterable[int] = ()
) -> tuple[int, ...]:
    """Grid positions of a prompt, all tokens, at which to keep the state as prefill passes them; in order.

    Args:
        resume_len: where the computation begins; the state there is kept already.
        branch_len: where the prompt leaves a path that goes on without it, floored to the grid; None where it leaves
            none, because nothing is known or because it begins with all that is known.
        asked: positions that a warming job or a pin wants, and the longest prefix that each tier can hold; those off
            the grid or beyond the prompt are not kept.
    """
    assert 0 <= resume_len <= prompt_len
    wanted = {prompt_len // grid * grid, *(position for position in asked if position % grid == 0)}
    if branch_len is not None:
        wanted.add(branch_len // grid * grid)
    return tuple(sorted(position for position in wanted if resume_len < position <= prompt_len))
