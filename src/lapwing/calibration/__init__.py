"""Held-out data → answers with a finite-sample guarantee: prediction sets that cover, alarms that are seldom false."""

from lapwing.calibration.alarms import Alarm, alarm
from lapwing.calibration.sets import Conformal, Intervals, LabelSets, conformal

__all__ = ["Alarm", "Conformal", "Intervals", "LabelSets", "alarm", "conformal"]
