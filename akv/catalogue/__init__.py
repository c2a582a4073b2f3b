"""The catalogue of events: what akv says something under, with level, fields, and what a reader does about it.

The reference page is made from it, and the architecture tests hold every call of `akv.observe` against it (V1).
"""

from akv.catalogue.connector import *  # noqa: F403 - `observe.NAME` is how the rest of akv names an event
from akv.catalogue.engines import *  # noqa: F403
from akv.catalogue.entry import CATALOGUE as CATALOGUE
from akv.catalogue.entry import LEVELS as LEVELS
from akv.catalogue.entry import STEP_FIELDS as STEP_FIELDS
from akv.catalogue.entry import Event as Event
from akv.catalogue.segments import *  # noqa: F403
