"""`LapwingRegressor` and `LapwingClassifier`: scikit-learn estimators; pip install lapwing[sklearn]"""

from lapwing.integrations.sklearn import LapwingClassifier, LapwingRegressor

__all__ = ["LapwingClassifier", "LapwingRegressor"]
