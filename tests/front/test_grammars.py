"""What a client's structure does to its worker stays there: it fails alone and by name, and the next one is checked."""

import asyncio
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import grpc
import pytest
from downcore.v1 import generation_pb2 as pb

from daemon.config import EngineConfig
from daemon.errors import ErrorReason, RequestError
from daemon.front import grammars, worker_pool
from daemon.front.config import FrontConfig
from daemon.front.grammars import Grammars
from tests.front.harness import Front, details_of, eventually, running_front, text_of, write_model_folder
from tests.front.hostile import hostile_structures, recursive_but_sound

LIMIT_S = 1.0
HOSTILE = hostile_structures()
SOUND = pb.StructuredOutput(choice=pb.Choices(values=["yes", "no"]))
TWO = pb.StoppingParams(max_tokens=2)


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Generator[Front]:
    """A front that gives a structure one second."""
    folder = tmp_path_factory.mktemp("strict")
    with running_front(folder, flags=("--grammar-timeout-s", str(LIMIT_S))) as front:
        yield front


def answer(front: Front, structure: pb.StructuredOutput) -> str:
    return text_of(front.generate("ok", structured_output=structure, stopping=TWO))


def next_works(front: Front) -> bool:
    return answer(front, SOUND) == "ok"


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_structure_is_answered_in_time_and_harms_itself_alone(strict: Front, name: str) -> None:
    hostile = HOSTILE[name]
    pids = strict.process.pid, strict.info().engine_pid
    assert next_works(strict)  # a worker is there, so that its start does not count
    began_s = time.monotonic()
    if hostile.reason is None:
        assert answer(strict, hostile.structure) == "ok"
    else:
        with pytest.raises(grpc.RpcError) as caught:
            answer(strict, hostile.structure)
        details = details_of(caught.value)
        assert details["ErrorInfo"].reason == hostile.reason
        violation = details["BadRequest"].field_violations[0]
        assert violation.field == f"structured_output.{hostile.structure.WhichOneof('structure')}"
        assert 5 < len(violation.description) <= 420
        assert not {"/root", "panicked", "Traceback"} & set(violation.description.split())
    assert time.monotonic() - began_s < LIMIT_S + 5.0  # the rest is this machine's load
    assert next_works(strict)
    assert (strict.process.pid, strict.info().engine_pid) == pids


def test_workers_were_killed_for_it_and_replaced(strict: Front) -> None:
    with pytest.raises(grpc.RpcError):
        answer(strict, HOSTILE["intersections"].structure)
    assert any("grammar worker replaced: time over" in line for line in strict.log)
    with pytest.raises(grpc.RpcError):
        answer(strict, HOSTILE["chain of rules"].structure)
    eventually(lambda: any("grammar worker replaced: IncompleteReadError" in line for line in strict.log))
    assert next_works(strict)


def test_abort_and_cancel_reach_a_request_whose_structure_is_being_checked(strict: Front) -> None:
    structure = HOSTILE["intersections"].structure
    call = strict.stream("ok", request_id="stuck", structured_output=structure, timeout=10)
    eventually(lambda: strict.generation.Abort(pb.AbortRequest(request_id="stuck"), timeout=5).found)
    got = list(call)
    assert [response.WhichOneof("event") for response in got] == ["finished", "summary"]
    assert got[0].finished.reason == pb.FINISH_REASON_ABORTED
    cancelled = strict.stream("ok", request_id="stuck2", structured_output=structure, timeout=10)
    cancelled.cancel()
    assert next_works(strict)
    eventually(lambda: not strict.generation.Abort(pb.AbortRequest(request_id="stuck2"), timeout=5).found)


def test_no_worker_is_started_before_a_structure_comes(front: Front) -> None:
    assert text_of(front.generate("ok", stopping=TWO)) == "ok"
    assert not grammar_workers(front.process.pid)
    assert next_works(front)
    assert len(grammar_workers(front.process.pid)) == 1


def grammar_workers(pid: int) -> list[int]:
    """Children of a front that check structures."""
    found: list[int] = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if "grammar_worker" in Path(f"/proc/{child}/cmdline").read_text():
            found.append(int(child))
    return found


def checked(folder: Path, *structures: tuple[pb.StructuredOutput, str], **options: Any) -> list[str | RequestError]:
    """What a Grammars of this folder says of each structure and namespace, one after the other."""

    async def run() -> list[str | RequestError]:
        found: list[str | RequestError] = []
        known = Grammars(FrontConfig(engine=EngineConfig(str(folder)), **options))
        try:
            for structure, namespace in structures:
                try:
                    found.append(await known.check(structure, namespace, (0,)))
                except RequestError as error:
                    found.append(error)
        finally:
            await known.stop()
        return found

    return asyncio.run(run())


def test_a_structure_is_checked_once_for_each_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    ask = Grammars._ask

    async def counting(self: Grammars, question: Any, eos: tuple[int, ...]) -> Any:
        asked.append(question.texts[0])
        return await ask(self, question, eos)

    monkeypatch.setattr(Grammars, "_ask", counting)
    monkeypatch.setattr(grammars, "MAX_KEPT", 2)
    good, bad = pb.StructuredOutput(regex="a"), pb.StructuredOutput(regex="(")
    rounds = [(good, "one"), (good, "one"), (bad, "one"), (bad, "one"), (good, "two"), (good, "one")]
    found = checked(write_model_folder(tmp_path), *rounds)
    assert asked == ["a", "(", "a", "a"]  # the last because two are kept
    assert found[0] == found[1] == found[4] == found[5]
    assert [error.reason for error in found[2:4] if isinstance(error, RequestError)] == (
        [ErrorReason.INVALID_ARGUMENT] * 2
    )


def test_recursion_that_ends_is_sound(tmp_path: Path) -> None:
    (grammar,) = checked(write_model_folder(tmp_path), (recursive_but_sound(), "one"))
    assert isinstance(grammar, str)
    assert "$defs" in grammar


def test_a_tokenizer_that_grammars_cannot_use_is_said_and_nothing_else_fails(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for error in checked(tmp_path, (SOUND, "one"), (SOUND, "one")):
        assert isinstance(error, RequestError)
        assert error.reason is ErrorReason.INVALID_ARGUMENT
        assert error.field == "structured_output"
        assert str(tmp_path) not in error.message


def test_workers_that_have_no_use_for_this_model_are_not_started_again(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")

    async def run() -> None:
        known = Grammars(FrontConfig(engine=EngineConfig(str(tmp_path)), grammar_workers=3))
        with pytest.raises(RequestError):
            await known.check(SOUND, "one", (0,))
        assert known.pids == ()
        await asyncio.sleep(2 * worker_pool.RESPAWN_DELAY_S)
        assert known.pids == ()
        await known.stop()

    asyncio.run(run())
