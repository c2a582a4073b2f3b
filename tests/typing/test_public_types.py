"""What a type checker sees of the public API. mypy reads this file; an ignore that hides no error is itself an error there."""

from typing import assert_type

import pytest

import akv
from akv import observe


def test_settings_are_typed() -> None:
    settings = akv.check_settings({"model_key": "m", "pool": "embedded"})
    assert_type(settings, akv.Settings)
    assert_type(settings.staging_buffer_bytes, int)
    assert_type(settings.lookup_deadline_s, float)
    with pytest.raises(TypeError):
        akv.Settings()  # type: ignore[call-arg]


def test_V1_events_are_constants_of_the_catalogue_not_strings() -> None:
    with pytest.raises(AttributeError):
        observe.emit("akv.load.failed")  # type: ignore[arg-type]
