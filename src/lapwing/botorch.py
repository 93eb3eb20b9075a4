"""`LapwingModel`, a BoTorch model made of a posterior; pip install lapwing[botorch]"""

from lapwing.integrations.botorch import FunctionDraw, LapwingModel

__all__ = ["FunctionDraw", "LapwingModel"]
