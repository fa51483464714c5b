"""The whole at a glance: what a database and a broker are used for, and what is wrong there.

In come a database and perhaps a broker; every capability says what there is to look at; out comes
an examination with a finding for each. Looking changes nothing, never takes longer than it may,
and names what could not be looked at.
"""

from holdfast.status.examination import Area, Examination, LookBounds, examine
from holdfast.status.tables import SchemaVersion, TablesFound

__all__ = ["Area", "Examination", "LookBounds", "SchemaVersion", "TablesFound", "examine"]
