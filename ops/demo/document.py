"""The demo's document and the questions put to it."""

from dataclasses import dataclass
from pathlib import Path

TITLE = "The Constitution of the United States, Articles I to VII"


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and a word that an answer from the document holds."""

    text: str
    expected: str


QUESTIONS = (
    Question("Who is the Commander in Chief of the Army and Navy?", "President"),
    Question("Who elects the House of Representatives?", "people"),
)


def read_document() -> str:
    """The text, which ships beside this file."""
    return (Path(__file__).parent / "constitution.txt").read_text(encoding="utf-8")


def make_prompt(document: str, question: Question) -> str:
    """The document first, so that prompts on it share their beginning."""
    return f"{document}\n\nQuestion: {question.text}\nAnswer:"
