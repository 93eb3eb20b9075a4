"""Prediction sets and alarms with finite-sample guarantees, from held-out data."""

from lapwing.calibration.alarms import Alarm, alarm
from lapwing.calibration.sets import Conformal, Intervals, LabelSets, conformal

__all__ = ["Alarm", "Conformal", "Intervals", "LabelSets", "alarm", "conformal"]
