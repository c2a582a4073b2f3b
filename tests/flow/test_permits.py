"""Whether pages are written is decided once, whoever asks first (D6)."""

from akv.flow.permits import WritePermit


def test_D6_what_was_taken_back_never_begins() -> None:
    permit = WritePermit()
    assert permit.take_back()
    assert not permit.begin()
    assert permit.take_back()


def test_D6_what_has_begun_is_not_taken_back_before_its_end() -> None:
    permit = WritePermit()
    assert permit.begin()
    assert not permit.take_back()
    permit.end()
    assert permit.take_back()
    assert not permit.begin()


def test_D6_what_ended_without_having_begun_never_begins() -> None:
    permit = WritePermit()
    permit.end()
    assert not permit.begin()
