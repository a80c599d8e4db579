"""The worker by itself: what somebody has sent leaves no trace in it that another could feel."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from daemon.front import tokenizer_messages as tm
from daemon.front.tokenizer_worker import Worker
from tests.front.harness import write_model_folder

NUM_WORDS = 400
WORD_CHARS = 250  # the library's table takes no longer ones
ROUNDS = 7


def folder_whose_words_are_dear(folder: Path) -> Path:
    """Of a tokenizer that makes few tokens of a long word by many merges: to find the word again saves most of that."""
    write_model_folder(folder)
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text())
    for length in (1, 2, 4, 8, 16, 32, 64):
        spec["model"]["vocab"]["h" * 2 * length] = len(spec["model"]["vocab"])
        spec["model"]["merges"].append(["h" * length] * 2)
    path.write_text(json.dumps(spec))
    return folder


def gain(make: Callable[[], Callable[[str], object]]) -> float:
    """How many times faster texts are encoded that were encoded before: the median of some rounds."""
    rng = random.Random(1)
    ratios: list[float] = []
    for _ in range(ROUNDS):
        encode = make()
        cuts = [rng.sample(range(WORD_CHARS), 2) for _ in range(NUM_WORDS)]
        texts = ["".join("e" if at in cut else "h" for at in range(WORD_CHARS)) for cut in cuts]
        taken_s: list[float] = []
        for _ in range(2):
            began_s = time.process_time()
            for text in texts:
                encode(text)
            taken_s.append(time.process_time() - began_s)
        ratios.append(taken_s[0] / taken_s[1])
    return sorted(ratios)[ROUNDS // 2]


def test_words_that_were_sent_before_are_not_ready_sooner(tmp_path: Path) -> None:
    folder = folder_whose_words_are_dear(tmp_path)
    as_it_comes = gain(lambda: Tokenizer.from_file(str(folder / "tokenizer.json")).encode)

    def worker() -> Callable[[str], object]:
        made = Worker(folder)
        return lambda text: made.reply(tm.EncodeText(text))

    assert as_it_comes > 1.5, "the library keeps no words by itself any more"
    assert gain(worker) < 1.25
