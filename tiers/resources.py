"""Everything one sequence has acquired, and the one way to give it back.

Whatever is acquired is registered here in the same moment, together with how to return it. `release` is the only exit:
finish, cancel, deadline, error, half-built admission and shutdown all take it.
"""

from collections.abc import Callable, Hashable, Iterable


class ReleaseError(Exception):
    """Some returns failed; all others were made. `errors` holds each failure with what it was returning."""

    def __init__(self, errors: list[tuple[str, Hashable, Exception]]) -> None:
        super().__init__("; ".join(f"{kind} {id_!r}: {error}" for kind, id_, error in errors))
        self.errors = errors


class Resources:
    """Holds (kind, id) pairs, each at most once, with its return."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._held: dict[tuple[str, Hashable], Callable[[], None]] = {}

    def hold(self, kind: str, id_: Hashable, give_back: Callable[[], None]) -> None:
        """Registers what was just acquired."""
        assert (kind, id_) not in self._held, f"{self.owner} already holds {kind} {id_!r}"
        self._held[(kind, id_)] = give_back

    def drop(self, kind: str, id_: Hashable) -> None:
        """Returns one thing early."""
        self._held.pop((kind, id_))()

    def swap(self, kind: str, old: Hashable, new: Hashable, give_back: Callable[[], None]) -> None:
        """Exchanges the identity of one thing for another without returning the first: its new owner holds it."""
        assert (kind, old) in self._held
        del self._held[(kind, old)]
        self.hold(kind, new, give_back)

    def ids(self, kind: str) -> list[Hashable]:
        """What is held of one kind, oldest first."""
        return [id_ for held_kind, id_ in self._held if held_kind == kind]

    def count(self, kind: str) -> int:
        return len(self.ids(kind))

    @property
    def is_empty(self) -> bool:
        return not self._held

    def release(self) -> None:
        """Returns everything, newest first, each thing once; goes on after a failure and reports all of them.

        Raises:
            ReleaseError: at least one return failed. Nothing is held any more all the same.
        """
        errors: list[tuple[str, Hashable, Exception]] = []
        while self._held:
            (kind, id_), give_back = self._held.popitem()
            try:
                give_back()
            except Exception as error:  # whatever went wrong, the rest must still be returned
                errors.append((kind, id_, error))
        if errors:
            raise ReleaseError(errors)


def release_all(owners: Iterable[Resources]) -> None:
    """Returns everything of several owners, in their order; what fails of one keeps nothing of the others.

    Raises:
        ReleaseError: with the failures of all.
    """
    errors: list[tuple[str, Hashable, Exception]] = []
    for resources in owners:
        try:
            resources.release()
        except ReleaseError as failed:
            errors += failed.errors
    if errors:
        raise ReleaseError(errors)
