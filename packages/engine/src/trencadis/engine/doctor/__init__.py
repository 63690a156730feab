"""Examines a machine and its device with a model: ``engine-serve doctor``.

`examine` asks a process of its own one check after the other, so that a check that raises, hangs or
ends the process is a line of the report, and the rest go on. Needs no PyTorch in the caller.
"""

from trencadis.engine.doctor.examination import examine
from trencadis.engine.doctor.finding import Finding, Status
from trencadis.engine.doctor.report import DoctorReport

__all__ = ["DoctorReport", "Finding", "Status", "examine"]
