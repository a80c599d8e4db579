"""A tokenizer process: `python -m daemon.front.tokenizer_worker --model PATH`, spawned, timed and killed by the front.

It runs what a model folder brings (a vocabulary, a chat template) on what a client sends, so it may hang or eat memory;
the first is the front's to end, the second is bounded here. It ends when its stdin does.
"""

import argparse
import array
import json
import os
import re
import resource
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from daemon.front import tokenizer_messages as tm
from daemon.front.token_bytes import AddedToken, UnsupportedTokenizer, token_bytes
from daemon.messages import HEADER

MAX_ADDRESS_BYTES = 4 << 30  # of the whole process; a template that needs more fails by itself
_SURROGATE = re.compile("[\ud800-\udfff]")


class TemplateRefusal(Exception):
    """The template itself refused these messages, by its raise_exception()."""


class Worker:
    """One model folder's tokenizer and template."""

    def __init__(self, folder: Path) -> None:
        spec = (folder / "tokenizer.json").read_text(encoding="utf-8")
        self._decoder: dict[str, Any] | None = json.loads(spec).get("decoder")
        self._tokenizer = Tokenizer.from_str(spec)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        _forget_words(self._tokenizer)
        config = _read_json(folder / "tokenizer_config.json")
        self._special = {
            name: _content(config[name])
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if config.get(name) is not None
        }
        self._template = _template(folder, config)

    def reply(self, question: tm.Question) -> tm.Reply:
        """The answer to one question; every fault of the question is a Failed."""
        match question:
            case tm.EncodeText():
                return self._encode(question.text, add_special_tokens=True)
            case tm.EncodeChat():
                return self._encode_chat(question)
            case tm.GetTable():
                added = {
                    token_id: AddedToken(token.content, token.special)
                    for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
                }
                return tm.Table(tuple(token_bytes(self._tokenizer.get_vocab(), added, self._decoder)))

    def _encode_chat(self, question: tm.EncodeChat) -> tm.Reply:
        if self._template is None:
            return tm.Failed("this model has no chat template")
        messages = [{"role": turn.role, "content": turn.content} for turn in question.turns]
        rendered: list[str] = []
        num_chars = 0
        try:
            pieces = self._template.generate(messages=messages, add_generation_prompt=True, tools=None, **self._special)
            for piece in pieces:
                num_chars += len(piece)
                if num_chars > question.max_bytes:
                    return tm.Failed(f"the rendered chat is larger than {question.max_bytes} bytes", too_large=True)
                rendered.append(piece)
        except (TemplateError, TemplateRefusal) as error:
            return tm.Failed(f"the model's chat template refused these messages: {_one_line(error)}")
        except Exception as error:  # it is a program of the folder's, which may raise whatever there is
            return tm.Failed(f"the model's chat template failed on these messages ({type(error).__name__})")
        text = "".join(rendered)
        if not text.isascii() and _SURROGATE.search(text):
            return tm.Failed("the model's chat template made a text that has no UTF-8 of these messages")
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> tm.Reply:
        ids = array.array("i", self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        assert ids.itemsize == 4
        if sys.byteorder == "big":
            ids.byteswap()
        return tm.Encoded(ids.tobytes())


def _template(folder: Path, config: dict[str, Any]) -> Template | None:
    path = folder / "chat_template.jinja"
    source: Any = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several by name
        entries = cast(list[dict[str, str]], source)
        source = next((entry["template"] for entry in entries if entry.get("name") == "default"), None)
    if source is None:
        return None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    names = cast(dict[str, Any], environment.globals)
    names.update(raise_exception=_raise, strftime_now=_now)
    environment.filters["tojson"] = _to_json
    return environment.from_string(source)


def _raise(message: str) -> NoReturn:
    raise TemplateRefusal(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: Any, indent: int | None = None) -> str:
    """As plain text: jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _content(token: Any) -> str:
    return cast(dict[str, str], token)["content"] if isinstance(token, dict) else token


def _forget_words(tokenizer: Tokenizer) -> None:
    """Has it keep no words: a text whose words somebody has sent before would be ready sooner, by an eighth.

    Tables of words that were seen are what makes common text fast: without, it takes half as long again.
    """
    resize: Any = getattr(tokenizer.model, "_resize_cache", None)  # of BPE and Unigram; the other models keep none
    if resize is not None:
        resize(0)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _read_exactly(stream: BinaryIO, size: int) -> bytes | None:
    data = stream.read(size)
    return data if len(data) == size else None


def serve(worker: Worker, source: BinaryIO, sink: BinaryIO) -> None:
    """Answers questions until the source ends."""
    while (header := _read_exactly(source, HEADER.size)) is not None:
        body = _read_exactly(source, HEADER.unpack(header)[0])
        if body is None:
            return
        sink.write(tm.frame(worker.reply(tm.question_decoder.decode(body))))
        sink.flush()


def main() -> int:
    """Exit status 0 at the end of stdin, 1 where the folder's tokenizer cannot be used (told on stdout)."""
    parser = argparse.ArgumentParser(prog="python -m daemon.front.tokenizer_worker", description="Run by the front.")
    parser.add_argument("--model", required=True, type=Path)
    folder = parser.parse_args().model
    for number in (signal.SIGINT, signal.SIGTERM):  # the front ends its workers; a terminal's signals go to all
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_BYTES, MAX_ADDRESS_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sink = sys.stdout.buffer
    try:
        worker = Worker(folder)
        worker.reply(tm.GetTable())
    except FileNotFoundError as error:
        return _refuse(sink, f"the model folder has no {Path(str(error.filename)).name}")
    except (UnsupportedTokenizer, TemplateError) as error:
        return _refuse(sink, _one_line(error))
    except Exception as error:  # the tokenizers library raises the bare class
        return _refuse(sink, f"tokenizer.json cannot be read ({_one_line(error)})")
    serve(worker, sys.stdin.buffer, sink)
    return 0


def _refuse(sink: BinaryIO, message: str) -> int:
    sink.write(tm.frame(tm.Failed(message)))
    sink.flush()
    return 1


if __name__ == "__main__":
    sys.exit(main())
